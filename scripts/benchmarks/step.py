"""Time of a training step: ours against DDP on Gloo, and one tower against a bare loop.

The towers of the first comparison are CPU towers; the one tower of the second is a GPU where there is one.
All variants live in the same processes and take turns in blocks of steps, so that each ratio compares
neighbours in time; medians over the turns are printed. "Bare loop ÷ its twin" compares two equal loops: what it
differs from 1 is the noise of the machine. Times are in milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

import figure
import models
import steps
import torch
from steps import Times
from torch.nn.parallel import DistributedDataParallel

import mirrored


def _two_towers(case: str, turns: int, seconds: float, implementation: str) -> Times:
    options = mirrored.CommunicationOptions(implementation=implementation)
    strategy = mirrored.MirroredStrategy(communication=options)
    torch.manual_seed(0)
    towers = strategy.num_replicas_in_sync
    x, y = models.batch(case, models.CASES[case] // towers, seed=strategy.topology.index)
    variants = {
        "ours": steps.ours(strategy, case, x, y, models.CASES[case]),
        "DDP": steps.plain(DistributedDataParallel(models.make(case), gradient_as_bucket_view=True), x, y),
        "bound": steps.plain(models.make(case), x, y),
    }
    return steps.alternate(variants, turns, seconds, together=True)


def _one_tower(case: str, turns: int, seconds: float) -> Times:
    strategy = mirrored.MirroredStrategy()
    torch.manual_seed(0)
    x, y = (tensor.to(strategy.device) for tensor in models.batch(case, models.CASES[case], seed=0))
    bare, twin = (steps.plain(models.make(case).to(strategy.device), x, y) for _ in range(2))
    variants = {"ours": steps.ours(strategy, case, x, y, models.CASES[case]), "bare": bare, "twin": twin}
    return steps.alternate(variants, turns, seconds, together=False)


def _ratios(times: Times, base: str, name: str = "ours") -> list[float]:
    return [a / b for a, b in zip(times[name], times[base], strict=True)]


def _row(label: str, times: Times, base: str, name: str = "ours") -> str:
    ratios = _ratios(times, base, name)
    ours, other = (statistics.median(times[which]) * 1e3 for which in (name, base))
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return (
        f"{label:<34}{ours:>9.2f}{other:>9.2f}{statistics.median(ratios):>9.3f}{quartiles[0]:>9.3f}{quartiles[2]:>8.3f}"
    )


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench step", description=__doc__)
    parser.add_argument("--cases", default=",".join(models.CASES), help="comma-separated: " + ", ".join(models.CASES))
    parser.add_argument("--towers", type=int, default=2, help="1 leaves the first comparison out")
    parser.add_argument("--implementation", default="auto", help="of the first comparison's towers: auto, gloo, …")
    parser.add_argument("--turns", type=int, default=9, help="alternations")
    parser.add_argument("--seconds", type=float, default=0.7, help="length of one variant's turn")
    figure.add_option(parser)
    options = parser.parse_args(arguments)
    bars = []
    print(f"torch {torch.__version__}; SGD with momentum; medians of {options.turns} alternations")
    print(f"{'':<34}{'ours ms':>9}{'other':>9}{'ratio':>9}{'25 %':>9}{'75 %':>8}")
    names = [f"cpu:{i}" for i in range(options.towers)]
    for case in options.cases.split(","):
        timing = (case, options.turns, options.seconds)
        if options.towers > 1:
            times = mirrored.launch(_two_towers, (*timing, options.implementation), devices=names)[0]
            print(_row(f"{case}: {options.towers} towers ÷ DDP on Gloo", times, "DDP"))
            print(_row(f"{case}: ÷ no communication", times, "bound"), flush=True)
            bars += [
                figure.bar(case, "ours ÷ DDP on Gloo", _ratios(times, "DDP")),
                figure.bar(case, "ours ÷ no communication", _ratios(times, "bound")),
            ]
        times = mirrored.launch(_one_tower, timing, towers=1)[0]
        print(_row(f"{case}: one tower ÷ bare loop", times, "bare"))
        print(_row(f"{case}: bare loop ÷ its twin", times, "twin", "bare"), flush=True)
        bars.append(figure.bar(case, "one tower ÷ bare loop", _ratios(times, "bare")))
    figure.draw(options.png, f"A training step, {options.towers} towers", bars)
