"""Time and throughput of a training step at several numbers of towers, ours against DDP on Gloo and no communication.

"weak" keeps the share of each tower (half of a case's batch), so that the global batch grows; "strong" keeps the global
batch, so that shares shrink. Every tower computes with one thread. With more towers than cores the towers take turns
on them, so no step can become faster: what is left to see there is what communication costs. "ex/s" are examples a
second, "÷ ideal" is that over what one tower makes, times the cores that the towers have. "÷ bound" compares with no
communication at all, "÷ DDP" with DDP on Gloo, which needs two towers; both took turns with ours in the same processes.
Times are in milliseconds, ratios come with their quartiles.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import command
import models
import steps
import torch

import mirrored
from towers.system import machine

BASES = {"bound": "no communication", "DDP": "DDP on Gloo"}
"""What our steps are compared with."""


def _measure(case: str, share: int, turns: int, seconds: float, implementation: str) -> steps.Times:
    """Seconds of each variant with ``share`` examples on this tower."""
    torch.set_num_threads(1)
    work = steps.Work(case, steps.strategy(implementation), share=share)
    variants = {"ours": work.ours(), "bound": work.bare()}
    if work.strategy.num_replicas_in_sync > 1:
        variants["DDP"] = work.ddp()
    return steps.alternate(variants, turns, seconds)


def _share(case: str, towers: int, weak: bool) -> int | None:
    """Examples of one tower; None where the batch cannot be cut evenly."""
    if weak:
        return max(1, models.CASES[case] // 2)
    return models.CASES[case] // towers if models.CASES[case] % towers == 0 else None


def _cells(ratio: steps.Ratio | None) -> str:
    if ratio is None:
        return f"{'–':>9}{'':>15}"
    return f"{ratio.value:>9.3f}{f'{ratio.low:.3f}–{ratio.high:.3f}':>15}"


def main(arguments: Sequence[str]) -> None:
    how = {"turns": 7, "seconds": 0.4, "towers": None, "chosen": "mlp-64,resnet-64", "implementation": True}
    parser = command.parser("scaling", __doc__, cases=models.CASES, **how)
    towers_help = "comma-separated; the first is what the others are held to"
    parser.add_argument("--towers", type=command.names, default="1,2,4,8", help=towers_help)
    parser.add_argument("--kinds", type=command.names, default="weak,strong", help="weak, strong or both")
    options = parser.parse_args(arguments)
    if unknown := set(options.kinds) - {"weak", "strong"}:
        parser.error(f"--kinds knows weak and strong, not {', '.join(unknown)}")
    cores = machine.cores()
    print(
        f"torch {torch.version.__version__}; {cores} cores, one thread a tower; SGD with momentum; "
        f"medians of {options.turns} alternations"
    )
    head = f"{'':<18}{'towers':>7}{'batch':>7}{'ours ms':>9}{'ex/s':>9}{'÷ ideal':>9}"
    print(f"{head}{'÷ bound':>9}{'quartiles':>15}{'÷ DDP':>9}{'quartiles':>15}")
    for case in options.cases:
        for kind in options.kinds:
            base = 0.0  # examples per second that one core makes
            for towers in map(int, options.towers):
                share = _share(case, towers, kind == "weak")
                if share is None:
                    print(f"{f'{case}: {kind}':<18}{towers:>7}  its batch cannot be cut evenly")
                    continue
                timing = (case, share, options.turns, options.seconds, options.implementation)
                times = mirrored.launch(_measure, timing, devices=command.cpus(towers))[0]
                seconds = statistics.median(times["ours"])
                rate = share * towers / seconds
                base = base or rate / min(towers, cores)
                ratios = {
                    name: steps.ratio_of(times["ours"], times[base]) for base, name in BASES.items() if base in times
                }
                cells = "".join(_cells(ratios.get(name)) for name in BASES.values())
                print(
                    f"{f'{case}: {kind}':<18}{towers:>7}{share * towers:>7}{seconds * 1e3:>9.2f}{rate:>9.0f}"
                    f"{rate / base / min(towers, cores):>9.3f}{cells}",
                    flush=True,
                )
