"""Time of an all-reduce between CPU towers: ours in shared memory against c10d's Gloo.

"in place" sums a tensor that lies in shared memory, as gradient buckets do; "any tensor" one that does not. All take
turns in the same processes; medians over the turns are printed. "÷ copy" compares with a plain copy of the same size on
one core, with the other towers idle; "all copy" is one on every tower at the same time. Times are in milliseconds.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import command
import steps
import torch
import torch.distributed as dist

import mirrored

SIZES = {"4KB": 2**10, "1MB": 2**18, "40MB": 10_000_000}
"""Names of sizes, and how many float32 they are."""


def _measure(numel: int, turns: int, seconds: float) -> steps.Times:
    """Seconds of each variant, one number a turn."""
    strategy = steps.strategy("shared_memory")
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
    return steps.alternate(variants, turns, seconds)


def main(arguments: Sequence[str]) -> None:
    parser = command.parser("allreduce", __doc__, turns=9, seconds=0.3)
    parser.add_argument(
        "--sizes", type=command.names, default=",".join(SIZES), help="comma-separated: " + ", ".join(SIZES)
    )
    options = parser.parse_args(arguments)
    print(f"torch {torch.version.__version__}; {options.towers} towers; medians of {options.turns} alternations")
    print(f"{'':<24}{'ms':>9}{'÷ Gloo':>9}{'25 %':>9}{'75 %':>8}{'÷ copy':>9}")
    for size in options.sizes:
        timing = (SIZES[size], options.turns, options.seconds)
        times = mirrored.launch(_measure, timing, devices=command.cpus(options.towers))[0]
        copy = statistics.median(times["copy"])
        for name, own in times.items():
            ratio, value = steps.ratio_of(own, times["Gloo"]), statistics.median(own)
            cells = f"{value * 1e3:>9.3f}{ratio.value:>9.3f}{ratio.low:>9.3f}{ratio.high:>8.3f}{value / copy:>9.2f}"
            print(f"{size + ': ' + name:<24}{cells}", flush=True)
