"""One accelerator (or CPU): what a step costs beside a bare loop, ordinary, compiled, in bf16, as a CUDA graph.

Prints one Markdown table for docs/project/benchmarks.md, with the name of the hardware. "One tower ÷ bare loop"
compares alternating steps of the same kind: the median of the ratios, their quartiles, and the median step of one
tower. "Two towers that share it ÷ one" (``--share``) is the price of trying a script for several towers on one device.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import command
import models
import steps
import torch
from plain import Forward, Step
from steps import Times, Work
from torch import nn

import mirrored
from towers.system import accelerator, devices


def _autocast(model: nn.Module, x: torch.Tensor) -> Forward:
    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return model(x).float()

    return forward


WAYS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "ordinary": lambda model, x: model,
    "bf16": _autocast,
    "compiled": lambda model, x: torch.compile(model),
    "graphed": lambda model, x: torch.cuda.make_graphed_callables(model, (x,)),
}
"""How a model's forward is called."""


def _variants(case: str, way: str) -> dict[str, Step]:
    """A step of one tower, and the bare loop that does the same."""
    work = Work(case, mirrored.MirroredStrategy())

    def forward_of(model: nn.Module) -> Forward:
        return WAYS[way](model, work.x)

    return {"ours": work.ours(forward_of=forward_of), "bare": work.bare(forward_of)}


def _one_tower(case: str, way: str, turns: int, seconds: float) -> Times:
    return steps.alternate(_variants(case, way), turns, seconds)


def _step_seconds(case: str, turns: int, seconds: float) -> list[float]:
    return steps.alternate({"ours": Work(case, mirrored.MirroredStrategy()).ours()}, turns, seconds)["ours"]


def main(arguments: Sequence[str]) -> None:
    chosen, seconds = "mlp-64,resnet-64,transformer-16", 0.5
    parser = command.parser("device", __doc__, turns=9, seconds=seconds, towers=None, cases=models.CASES, chosen=chosen)
    default = f"{devices.accelerator_kind()}:0"
    parser.add_argument("--device", default=default, help="default: the first accelerator, else the CPU")
    parser.add_argument("--ways", type=command.names, default=",".join(WAYS), help=f"comma-separated: {','.join(WAYS)}")
    parser.add_argument("--share", action="store_true", help="also measure two towers that share the device")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    name = accelerator.name(device) if device.type != "cpu" else "CPU"
    ways = [way for way in options.ways if way != "graphed" or device.type == "cuda"]
    print(f"{name}, torch {torch.version.__version__}; medians of {options.turns} alternations\n")
    print("| one tower ÷ bare loop | " + " | ".join(ways) + " |")
    print("|---|" + "---|" * len(ways))
    for case in options.cases:
        cells = []
        for way in ways:
            try:
                timing = (case, way, options.turns, options.seconds)
                times = mirrored.launch(_one_tower, timing, devices=[options.device])[0]
            except mirrored.TowerFailedError as error:  # the others are still worth knowing
                cells.append(str(error).strip().splitlines()[-1])
                continue
            ratio = steps.ratio_of(times["ours"], times["bare"])
            milliseconds = statistics.median(times["ours"]) * 1e3
            cells.append(f"{ratio.value:.3f} ({ratio.low:.3f}–{ratio.high:.3f}; {milliseconds:.2f} ms)")
        print(f"| {case} | " + " | ".join(cells) + " |", flush=True)
    if not options.share:
        return
    pair = [options.device] * 2 if device.type != "cpu" else command.cpus(2)
    print("\n| two towers that share it ÷ one | |\n|---|---|")
    for case in options.cases:
        one, two = (
            mirrored.launch(_step_seconds, (case, options.turns, options.seconds), devices=names)[0]
            for names in (pair[:1], pair)
        )
        print(f"| {case} | {statistics.median(two) / statistics.median(one):.2f} |", flush=True)
