"""``scripts/plan --measure``: the model against this machine, at 1 to 8 CPU towers.

A few numbers for each way of communicating are fitted to some all-reduces; the others, and whole training steps, are
predicted and compared with what they take.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import cpu
import models
import plain
import steps
import torch
import torch.distributed as dist
from units import as_duration, in_ms

import mirrored
from towers.collectives.agreement import announce
from towers.collectives.communicator import Alone, Communicator
from towers.system import machine

SIZES = {"4KB": 2**12, "64KB": 2**16, "1MB": 2**20, "4MB": 2**22, "16MB": 2**24}
TOWERS = (2, 3, 4, 6, 8)
FITTED_TOWERS, FITTED_SIZES = (2, 4), ("4KB", "1MB", "16MB")
"""What the fit sees: all of these towers with all of these sizes. Everything else is held out."""

KINDS: dict[str, tuple[cpu.Terms, Sequence[str]]] = {
    "shared memory": (cpu.shared_memory, cpu.SHARED_MEMORY),
    "Gloo": (cpu.gloo, cpu.GLOO),
}
STEP_TOWERS = (1, 2, 4, 8)


def _all_reduces(turns: int, seconds: float) -> tuple[dict[tuple[str, int], float], float]:
    """In a tower: seconds of each kind and size, and seconds of copying 40 MB while all towers do."""
    strategy = mirrored.MirroredStrategy(communication=mirrored.CommunicationOptions(implementation="shared_memory"))
    torch.set_num_threads(1)
    comm = strategy.communicator
    found: dict[tuple[str, int], float] = {}
    for key, nbytes in enumerate(SIZES.values()):
        region = comm.allocate(key, nbytes // 4, torch.float32, comm.device)
        other = torch.zeros(nbytes // 4)
        variants = {"shared memory": _averaging(comm, region), "Gloo": _gloo(other)}
        for name, times in steps.alternate(variants, turns, seconds, together=True).items():
            found[name, nbytes] = statistics.median(times)
        comm.release(key)
    source, target = torch.ones(10_000_000), torch.zeros(10_000_000)
    copies = steps.alternate({"copy": lambda: target.copy_(source)}, turns, seconds, together=True)
    return found, statistics.median(copies["copy"])


def _averaging(comm: Communicator, region: torch.Tensor) -> Callable[[], object]:
    return lambda: comm.start_average(region).wait()


def _gloo(tensor: torch.Tensor) -> Callable[[], object]:
    return lambda: dist.all_reduce(tensor)


def _step(case: str, share: int, turns: int, seconds: float, implementation: str) -> dict[str, float]:
    """In a tower: seconds of our step, of one without communication, and of that on as many towers as there are cores.

    All take turns, so that they see the same machine. Beside them, bytes of the gradients.
    """
    options = mirrored.CommunicationOptions(implementation=implementation)
    strategy = mirrored.MirroredStrategy(communication=options)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    towers = strategy.num_replicas_in_sync
    x, y = models.batch(case, share, seed=strategy.topology.index)
    model = models.make(case)
    bound = plain.step(model, x, y)
    variants = {"ours": steps.ours(strategy, case, x, y, share * towers), "bound": bound}
    if towers > machine.cores():
        variants["one each"] = bound if strategy.topology.index < machine.cores() else lambda: None
    times = steps.alternate(variants, turns, seconds, together=towers > 1)
    found = {name: statistics.median(values) for name, values in times.items()}
    return {"one each": found["bound"], **found, "bytes": float(sum(p.nbytes for p in model.parameters()))}


def _devices(towers: int) -> list[str]:
    return [f"cpu:{i}" for i in range(towers)]


def check(turns: int, seconds: float, cases: Sequence[str]) -> None:
    """Measure, fit, predict and print."""
    here = cpu.Machine(machine.cores(), _last_cache())
    print(
        f"torch {torch.version.__version__}; {here.cores} cores, {here.cache / 2**20:.0f} MiB of cache; "
        f"one thread a tower; medians of {turns} turns"
    )
    measured: dict[str, list[cpu.Point]] = {kind: [] for kind in KINDS}
    copy = 0.0
    for towers in TOWERS:
        found, copying = mirrored.launch(_all_reduces, (turns, seconds), devices=_devices(towers))[0]
        for (kind, nbytes), value in found.items():
            measured[kind].append(cpu.Point(towers, nbytes, value))
        if towers == min(TOWERS, key=lambda n: abs(n - here.cores)):
            copy = copying / 40e6
    fits = {kind: _check_kind(kind, points, here) for kind, points in measured.items()}
    print(f"\ncopying with all cores at work: {1 / copy / 1e9:.1f} GB/s each")
    print(f"a request to the store of the start-up, on loopback: {as_duration(_store_request())}")
    print(f"reading one tower's announcement: {as_duration(_reading())}")
    _check_steps(turns, seconds, cases, fits, copy, here)


def _check_kind(kind: str, points: Sequence[cpu.Point], here: cpu.Machine) -> list[float]:
    (terms, names), sizes = KINDS[kind], {SIZES[name] for name in FITTED_SIZES}
    seen = [p for p in points if p.towers in FITTED_TOWERS and p.nbytes in sizes]
    fit = cpu.fit(seen, terms, here)
    found = (
        f"{value * 1e9:.3f} ns {name}" if "byte" in name else f"{value * 1e6:.0f} µs {name}"
        for name, value in zip(names, fit, strict=True)
    )
    print(f"\n{kind}: {', '.join(found)}")
    print(f"{'towers':>6}{'size':>7}{'measured ms':>13}{'predicted ms':>14}{'predicted ÷ measured':>22}")
    of_size = {nbytes: name for name, nbytes in SIZES.items()}
    held: list[float] = []
    for p in points:
        predicted = cpu.predict(fit, terms, p.towers, p.nbytes, here)
        ratio = predicted / p.seconds
        if p not in seen:
            held.append(ratio)
        print(
            f"{p.towers:>6}{of_size[int(p.nbytes)]:>7}{in_ms(p.seconds):>13}{in_ms(predicted):>14}{ratio:>22.2f}"
            f"{'  fitted' if p in seen else ''}"
        )
    errors = sorted(max(ratio, 1 / ratio) for ratio in held)
    print(
        f"held out: off by a factor of {statistics.median(errors):.2f} in the median, {errors[-1]:.2f} at worst "
        f"({len(held)} points)",
        flush=True,
    )
    return fit


def _check_steps(
    turns: int, seconds: float, cases: Sequence[str], fits: dict[str, list[float]], copy: float, here: cpu.Machine
) -> None:
    print(
        "\nA training step, a fixed share for each tower. Compute is measured without communication on as many towers"
        "\nas there are cores, in turns with the step; with N times as many it is predicted to take N times as long."
        "\nThe gradients' way into the buckets and the all-reduce come from the figures above, not from any step."
    )
    head = f"{'':<36}{'towers':>7}{'measured ms':>13}{'predicted ms':>14}{'÷ measured':>12}"
    print(f"{head}{'compute ÷ measured':>20}{'the rest, ms':>14}{'measured':>10}")
    for case in cases:
        share = max(1, models.CASES[case] // 2)
        for kind, implementation in (("shared memory", "shared_memory"), ("Gloo", "gloo")):
            for towers in STEP_TOWERS:
                timing = (case, share, turns, 3 * seconds, implementation)
                found = mirrored.launch(_step, timing, devices=_devices(towers))[0]
                compute, rest = found["one each"] * here.turns(towers), 0.0
                if towers > 1:
                    rest = cpu.predict(fits[kind], KINDS[kind][0], towers, found["bytes"], here)
                    rest += copy * found["bytes"] * here.turns(towers)
                ours, bound, total = found["ours"], found["bound"], compute + rest
                print(
                    f"{f'{case}, {share} each: {kind}':<36}{towers:>7}{in_ms(ours):>13}{in_ms(total):>14}"
                    f"{total / ours:>12.2f}{compute / bound:>20.2f}{in_ms(rest):>14}{in_ms(ours - bound):>10}",
                    flush=True,
                )


def _last_cache() -> float:
    """Bytes of the largest cache that a core has; 32 MiB where it cannot be told."""
    texts = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((float(text[:-1]) * {"K": 2**10, "M": 2**20}[text[-1]] for text in texts), default=2.0**25)


def _store_request() -> float:
    """Seconds of one request to a store as the start-up uses it."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
    store.set("message", "x" * 500)
    started = time.perf_counter()
    for _ in range(500):
        store.check(["message"])
        store.get("message")
    return (time.perf_counter() - started) / 1000


class _Many(Alone):
    """Hears itself from as many towers as it is told, at once."""

    def __init__(self, size: int) -> None:
        super().__init__(torch.device("cpu"))
        self.size = size

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.expand(self.size, *tensor.shape).contiguous()


def _reading() -> float:
    """Seconds that a tower spends on what each other one announces, without the way there."""
    many = _Many(1000)
    started = time.perf_counter()
    for _ in range(5):
        announce(many, "reduce('sum', axis=None)", ["tensor", [["torch.float32", [], 1]]], bytes(4))
    return (time.perf_counter() - started) / 5 / many.size
