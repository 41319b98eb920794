"""All-reduces of random size, dtype and operation through shared memory, against a reference.

Each result is compared with a reduction in float64 in the order of the towers, within the dtype's rounding, and by its
digest on all towers. The digest of all results is printed: it is the same in every run with the same arguments.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import time
from collections.abc import Iterator

import torch
from torch import Tensor

import mirrored

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def reduce_at_random(count: int, largest: int, seed: int) -> str:
    strategy = mirrored.MirroredStrategy(communication=mirrored.CommunicationOptions(implementation="shared_memory"))
    comm = strategy.communicator
    pool = torch.randn(largest + 1000, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    draw = random.Random(f"{seed} {comm.size}")
    digest = hashlib.blake2b()
    for number in range(count):
        dtype = draw.choice(FLOATS + INTEGERS)
        ops = ("sum", "prod") if dtype.is_complex else ("sum", "prod", "min", "max")
        op, in_place = draw.choice(ops), draw.random() < 0.3 and dtype in FLOATS and not dtype.is_complex
        size = draw.choice((0, int(largest ** draw.random()), int(largest ** draw.random())))
        starts = [draw.randrange(1000) for _ in range(comm.size)]
        own = _part(pool, starts[comm.index], size, dtype)
        if in_place:
            op, key = "sum", 0
            result = comm.allocate(key, size, dtype, comm.device).copy_(own)
            comm.submit_average(result).wait()
            comm.release(key)
        else:
            result = own.clone()
            comm.all_reduce(result, op)
        if number % comm.size == comm.index:  # towers take turns, to be done sooner
            parts = (_part(pool, start, size, dtype) for start in starts)
            _check(result, parts, op, comm.size, comm.size if in_place else 1)
        own_digest = hashlib.blake2b(result.view(torch.uint8).numpy().tobytes()).digest()
        if any(other != own_digest for other in comm.all_gather_bytes(own_digest)):
            raise AssertionError(f"results differ between towers: number {number}, {dtype}, {op}, {size} elements")
        digest.update(own_digest)
    return digest.hexdigest()[:16]


def _part(pool: Tensor, start: int, size: int, dtype: torch.dtype) -> Tensor:
    values = pool[start : start + size]
    return (values if dtype in FLOATS else (values * 3).round()).to(dtype)


def _check(result: Tensor, parts: Iterator[Tensor], op: str, towers: int, divisor: int) -> None:
    combine = {"sum": torch.add, "prod": torch.mul, "min": torch.minimum, "max": torch.maximum}[op]
    integral = not (result.is_floating_point() or result.is_complex())
    wide = torch.int64 if integral else torch.complex128 if result.is_complex() else torch.float64
    expected = next(parts).to(wide)
    bound = expected.abs()
    for part in parts:
        expected = combine(expected, part.to(wide))
        bound = torch.maximum(bound + part.to(wide).abs(), expected.abs()) if op == "sum" else expected.abs()
    if integral:
        assert torch.equal(result, expected.to(result.dtype)), (op, result.dtype)
        return
    rounding = towers * torch.finfo(result.dtype).eps * (bound + torch.finfo(result.dtype).tiny * 8) * 2
    error = (result.to(wide) * divisor - expected).abs()
    tiny = torch.finfo(result.dtype).smallest_normal
    assert bool((error <= rounding + tiny * towers).all()), (op, result.dtype, float(error.max()))


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/stress", description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="all-reduces in all")
    parser.add_argument("--towers", default="2,3,4,5,6,7,8", help="numbers of towers, comma-separated")
    parser.add_argument("--largest", type=int, default=20_000_000, help="elements")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts = [int(text) for text in options.towers.split(",")]
    for towers in counts:
        started = time.perf_counter()
        arguments = (-(-options.count // len(counts)), options.largest, options.seed)
        digests = mirrored.launch(reduce_at_random, arguments, devices=[f"cpu:{i}" for i in range(towers)])
        took = time.perf_counter() - started
        print(f"{towers} towers: {arguments[0]} all-reduces right, digest {digests[0]}, {took:.0f} s", flush=True)


if __name__ == "__main__":
    main()
