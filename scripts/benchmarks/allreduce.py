"""Time of an all-reduce between CPU towers: ours in shared memory against c10d's Gloo.

"in place" sums a tensor that lies in shared memory, as gradient buckets do; "any tensor" one that does not. All take
turns in the same processes; medians over the turns are printed. "÷ copy" compares with a plain copy of the same size on
one core, with the other towers idle; "all copy" is one on every tower at the same time. Times are in milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import figure
import ratios
import steps
import torch
import torch.distributed as dist

import mirrored

SIZES = {"4KB": 2**10, "1MB": 2**18, "40MB": 10_000_000}
"""Names of sizes, and how many float32 they are."""


def _measure(numel: int, turns: int, seconds: float) -> steps.Times:
    """Seconds of each variant, one number a turn."""
    strategy = mirrored.MirroredStrategy(communication=mirrored.CommunicationOptions(implementation="shared_memory"))
    comm = strategy.communicator
    region = comm.allocate(0, numel, torch.float32, comm.device)
    plain, other, source = torch.zeros(numel), torch.zeros(numel), torch.ones(numel)
    variants: dict[str, steps.Step] = {
        "ours, in place": lambda: comm.submit_average(region).wait(),
        "ours, any tensor": lambda: comm.all_reduce(plain),
        "Gloo": lambda: dist.all_reduce(other),
        "copy": (lambda: plain.copy_(source)) if strategy.is_chief else (lambda: None),  # the others wait
        "all copy": lambda: plain.copy_(source),
    }
    return steps.alternate(variants, turns, seconds, together=True)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench allreduce", description=__doc__)
    parser.add_argument("--sizes", default=",".join(SIZES), help="comma-separated: " + ", ".join(SIZES))
    parser.add_argument("--towers", type=int, default=2)
    parser.add_argument("--turns", type=int, default=9, help="alternations")
    parser.add_argument("--seconds", type=float, default=0.3, help="length of one variant's turn")
    figure.add_option(parser)
    options = parser.parse_args(arguments)
    bars = []
    print(f"torch {torch.version.__version__}; {options.towers} towers; medians of {options.turns} alternations")
    print(f"{'':<24}{'ms':>9}{'÷ Gloo':>9}{'25 %':>9}{'75 %':>8}{'÷ copy':>9}")
    for size in options.sizes.split(","):
        devices = [f"cpu:{i}" for i in range(options.towers)]
        times = mirrored.launch(_measure, (SIZES[size], options.turns, options.seconds), devices=devices)[0]
        copy = statistics.median(times["copy"])
        for name, own in times.items():
            found, value = ratios.compare(own, times["Gloo"]), statistics.median(own)
            cells = f"{value * 1e3:>9.3f}{found.value:>9.3f}{found.low:>9.3f}{found.high:>8.3f}{value / copy:>9.2f}"
            print(f"{size + ': ' + name:<24}{cells}", flush=True)
            if name.startswith("ours"):
                bars.append(figure.Bar(size, name, found))
    figure.draw(options.png, f"An all-reduce ÷ Gloo's, {options.towers} towers", bars)
