"""Time of a training step between hosts: ours against DDP on Gloo, and against the larger of computing and the wire.

Hosts are network namespaces of this machine with cables between them, made for the benchmark and removed after it (this
needs root and iproute2). ``--shapes`` are hosts x CPU towers of each; ``--rates`` Gbit/s of a cable in each direction,
"none" for no limit; ``--delays`` ms from one host to another, which a program makes that takes up to some tenths of a
core. "Computing" is the same step without any communication, on all towers at once. "The wire" is the time that the
gradients' bytes, without headers, take at the cable's rate: 2 (H - 1) / H of them leave each of H hosts, and as many
come in. ``--variants``: "ours"; "bf16", ours with ``wire_dtype="bfloat16"``; "powersgd", ours with gradients compressed
to rank 4, whose bytes count as none. All variants take turns in the same processes, with one thread for each tower;
medians over the turns are printed. What the cable really does is measured first, and how long forward, backward and the
optimizer take: what the model of scripts/plan makes of these is compared with ours. Times are in milliseconds.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple

import cable
import command
import models
import plain
import steps
import torch
import torch.distributed as dist

import mirrored
from towers.options import GLOO_BUCKET_BYTES

sys.path.append(str(pathlib.Path(__file__).parents[1]))
import planning

LABELS = {"ours": "ours", "bf16": "bf16 on the wire", "powersgd": "PowerSGD"}
"""What is compared with DDP and the bound."""

_OPTIONS = {
    "bf16": mirrored.CommunicationOptions(wire_dtype="bfloat16"),
    "powersgd": mirrored.CommunicationOptions(compression=mirrored.PowerSGD(rank=4, start_step=0)),
}
_BYTES = {"ours": 1.0, "bf16": 0.5, "powersgd": 0.0}  # of the gradients', that cross

_PROBE = 2**23  # bytes that are sent to find the cable's rate
_INSIDE = planning.Link(10e-6, 10e9)  # of two towers through shared memory, as scripts/bench allreduce has measured


class _Work(NamedTuple):
    """What the towers do."""

    case: str
    variants: Sequence[str]
    turns: int
    seconds: float


class _Found(NamedTuple):
    """What tower 0 has found.

    Attributes:
        nbytes: of the gradients.
        phases: seconds of forward, backward and the optimizer's step, without communication.
        gigabits, round_trip: what the cable does, in Gbit/s, and in seconds there and back.
    """

    times: steps.Times
    nbytes: int
    phases: list[float]
    gigabits: float
    round_trip: float


def main(arguments: Sequence[str]) -> None:
    parser = command.parser("hosts", __doc__, turns=5, seconds=2.0, towers=None, cases=models.CASES, chosen="even-64")
    parser.add_argument("--shapes", type=command.names, default="2x1,2x2,3x1", help="hosts x towers")
    parser.add_argument("--rates", type=command.names, default="none,10,1,0.1", help="Gbit/s, or none")
    parser.add_argument("--delays", type=command.names, default="0", help="ms")
    parser.add_argument("--variants", type=command.names, default="ours", help="comma-separated: " + ", ".join(LABELS))
    options = parser.parse_args(arguments)
    try:
        shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes]
        rates = [None if rate == "none" else float(rate) for rate in options.rates]
        delays = [float(delay) for delay in options.delays]
        assert all(hosts > 1 and towers > 0 for hosts, towers in shapes)
    except (ValueError, AssertionError):
        parser.error("--shapes are such as 2x2 (two hosts or more), --rates and --delays numbers or 'none'")
    if unknown := set(options.variants) - set(LABELS):
        parser.error(f"unknown variants: {', '.join(sorted(unknown))}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # namespaces are removed then, too
    variants = [variant for variant in LABELS if variant in options.variants]
    steps.print_head(f"medians of {options.turns} alternations")
    for (hosts, towers), rate, delay in itertools.product(shapes, rates, delays):
        limit = "no limit" if rate is None else f"{rate:g} Gbit/s"
        for case in options.cases:
            work = _Work(case, variants, options.turns, options.seconds)
            try:
                with cable.hosts(hosts, rate, delay) as places:
                    found = _measure(places, towers, work)
            except cable.CannotPlayError as error:
                sys.exit(f"scripts/bench hosts: {error}")
            _print(f"{case}, {hosts}x{towers}, {limit}, {delay:g} ms", hosts, rate, found, variants)
            if "ours" in variants:
                steps.print_row("  the model of scripts/plan ÷ ours", *_planned(hosts, towers, found))


def _print(name: str, hosts: int, rate: float | None, found: _Found, variants: Sequence[str]) -> None:
    times, crossing = found.times, 2 * (hosts - 1) / hosts * found.nbytes
    print(f"{name}: the cable does {found.gigabits:.3g} Gbit/s, there and back in {found.round_trip * 1e3:.3g} ms")
    for variant in variants:
        wire = 0.0 if rate is None else crossing * 8 / (rate * 1e9) * _BYTES[variant]
        bounds = [max(compute, wire) for compute in times["bound"]]
        steps.print_row(f"  {LABELS[variant]} ÷ DDP", times[variant], times["DDP"])
        larger = "the wire" if wire > statistics.median(times["bound"]) else "computing"
        steps.print_row(f"  {LABELS[variant]} ÷ bound ({larger})", times[variant], bounds)
    for variant in variants[1:] if "ours" in variants else ():
        steps.print_row(f"  {LABELS[variant]} ÷ ours", times[variant], times["ours"])


def _planned(hosts: int, towers: int, found: _Found) -> tuple[list[float], list[float]]:
    """What the model says of a step with the phases and the cable that were found, and what it took, turn by turn."""
    across = planning.Link(found.round_trip / 2, found.gigabits * 1e9 / 8)
    cluster = planning.Cluster(hosts, towers, _INSIDE, across)
    model = planning.Model(found.nbytes, *found.phases, bucket=GLOO_BUCKET_BYTES)
    planned = planning.step(model, cluster, "hierarchical").total
    return [planned] * len(found.times["ours"]), found.times["ours"]


def _measure(places: Sequence[tuple[str, str]], towers: int, work: _Work) -> _Found:
    """Start the towers on their hosts, and return what tower 0 has found."""
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder, "found.json")
        program = [sys.executable, __file__, str(result), json.dumps(work)]
        started: list[subprocess.Popen[str]] = []
        try:
            for rank in range(len(places) * towers):
                numbers = {"RANK": rank, "WORLD_SIZE": len(places) * towers}
                numbers |= {"LOCAL_RANK": rank % towers, "LOCAL_WORLD_SIZE": towers}
                variables = {name: str(number) for name, number in numbers.items()}
                variables |= {"MASTER_ADDR": places[0][1], "MASTER_PORT": "29400", "OMP_NUM_THREADS": "1"}
                started.append(cable.start_in(places[rank // towers][0], program, variables))
            while any(process.poll() is None for process in started):
                if failed := [process for process in started if process.poll()]:
                    raise RuntimeError(f"a tower has failed: {failed[0].communicate()[1]}")
                time.sleep(0.1)
        finally:
            for process in started:
                process.kill()
                process.communicate()
        return _Found(*json.loads(result.read_text()))


def _tower() -> None:
    """One tower of the benchmark; tower 0 writes down what it has found."""
    case, variants, turns, seconds = _Work(*json.loads(sys.argv[2]))
    strategy = steps.strategy("auto")
    work = steps.Work(case, strategy)
    gigabits, round_trip = _probe(strategy.topology.local_size)
    chosen: dict[str, plain.Step] = {}
    if "ours" in variants:
        chosen["ours"] = work.ours()
    for variant in variants:
        if (options := _OPTIONS.get(variant)) is not None:
            chosen[variant] = work.ours(mirrored.MirroredStrategy(communication=options))
    chosen |= {"DDP": work.ddp(), "bound": work.bare()}
    phases = _phases(work)
    times = steps.alternate(chosen, turns, seconds)
    if strategy.is_chief:
        nbytes = sum(parameter.nbytes for parameter in models.make(case).parameters())
        pathlib.Path(sys.argv[1]).write_text(json.dumps(_Found(times, nbytes, phases, gigabits, round_trip)))


def _phases(work: steps.Work) -> list[float]:
    """Seconds of forward, backward and the optimizer's step, while all towers compute: medians of 15 steps."""
    model = work.model()
    optimizer = work.make_optimizer(model.parameters())
    moments = []
    dist.barrier()
    for _ in range(15):
        begun = time.perf_counter()
        optimizer.zero_grad()
        loss = models.per_example_loss(model(work.x), work.y).mean()
        forward = time.perf_counter()
        loss.backward()
        backward = time.perf_counter()
        optimizer.step()
        moments.append((forward - begun, backward - forward, time.perf_counter() - backward))
    return [statistics.median(seconds) for seconds in zip(*moments, strict=True)]


def _probe(other: int) -> tuple[float, float]:
    """What the cable from tower 0 to tower ``other`` does: Gbit/s, and seconds there and back."""
    seconds = []
    for nbytes in (1, 1, 1, _PROBE, _PROBE):
        data, reply = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
        dist.barrier()
        started = time.perf_counter()
        if dist.get_rank() == 0:
            dist.send(data, other)
            dist.recv(reply, other)
        elif dist.get_rank() == other:
            dist.recv(data, 0)
            dist.send(reply, 0)
        seconds.append(time.perf_counter() - started)
    round_trip = min(seconds[:3])
    return _PROBE * 8e-9 / (min(seconds[3:]) - round_trip), round_trip


if __name__ == "__main__":
    _tower()
