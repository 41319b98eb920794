"""One accelerator (or CPU): what a step costs beside a bare loop, ordinary, compiled, in bf16, as a CUDA graph.

Prints one Markdown table for docs/benchmarks.md, the hardware named. "One tower ÷ bare loop" compares steps of the same
kind that take turns. "Two towers that share it ÷ one" is the price of trying a script for several towers on one device.
Host synchronisations are counted by the profiler in ten steps of one tower, less those of ten steps of the bare loop.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import models
import plain
import ratios
import steps
import torch
from steps import Times
from torch import nn

import mirrored
from towers.system import accelerator, devices

COUNTED = 10


def _graphed(model: nn.Module, x: torch.Tensor) -> Any:
    return torch.cuda.make_graphed_callables(model, (x,))


def _autocast(model: nn.Module, x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return model(x).float()

    return forward


WAYS: dict[str, Callable[[nn.Module, torch.Tensor], Any]] = {
    "ordinary": lambda model, x: model,
    "bf16": _autocast,
    "compiled": lambda model, x: torch.compile(model),
    "graphed": _graphed,
}
"""How a model's forward is called."""


def _variants(case: str, way: str) -> dict[str, plain.Step]:
    """A step of one tower, and the bare loop that does the same."""
    strategy = mirrored.MirroredStrategy()
    torch.manual_seed(0)
    x, y = (tensor.to(strategy.device) for tensor in models.batch(case, models.CASES[case], seed=0))
    with strategy.scope():
        model = models.make(case)
    alone = models.make(case).to(strategy.device)
    called, bare = WAYS[way](model, x), WAYS[way](alone, x)
    optimizer, other = (plain.OPTIMIZERS["sgd"](m.parameters()) for m in (model, alone))

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = mirrored.compute_average_loss(models.per_example_loss(called(x), y))
        loss.backward()
        optimizer.step()
        return loss.detach()

    def bare_step() -> None:
        other.zero_grad()
        models.per_example_loss(bare(x), y).mean().backward()
        other.step()

    return {"ours": lambda: strategy.run(train_step, args=(x, y)), "bare": bare_step}


def _one_tower(case: str, way: str, turns: int, seconds: float) -> Times:
    return steps.alternate(_variants(case, way), turns, seconds, together=False)


def _synchronisations(case: str) -> dict[str, int]:
    """How often the host waits for the device in some steps, by variant."""
    found = {}
    for name, step in _variants(case, "ordinary").items():
        for _ in range(3):
            step()
        with torch.profiler.profile() as profile:
            for _ in range(COUNTED):
                step()
        found[name] = sum(event.count for event in profile.key_averages() if "Synchronize" in event.key)
    return found


def _step_seconds(case: str, turns: int, seconds: float) -> list[float]:
    strategy = mirrored.MirroredStrategy()
    share = models.CASES[case] // strategy.num_replicas_in_sync
    x, y = (tensor.to(strategy.device) for tensor in models.batch(case, share, seed=strategy.topology.index))
    step = steps.ours(strategy, case, x, y, models.CASES[case])
    return steps.alternate({"ours": step}, turns, seconds, together=strategy.num_replicas_in_sync > 1)["ours"]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench device", description=__doc__)
    here = devices.accelerator_kind()
    parser.add_argument("--device", default=f"{here}:0", help="default: the first accelerator, else the CPU")
    parser.add_argument("--cases", default="mlp-64,resnet-64,transformer-16", help="comma-separated")
    parser.add_argument("--ways", default=",".join(WAYS), help="comma-separated: " + ", ".join(WAYS))
    parser.add_argument("--turns", type=int, default=9, help="alternations")
    parser.add_argument("--seconds", type=float, default=0.5, help="length of one variant's turn")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    name = accelerator.name(device) if device.type != "cpu" else "CPU"
    ways = [way for way in options.ways.split(",") if way != "graphed" or device.type == "cuda"]
    print(f"{name}, torch {torch.version.__version__}; medians of {options.turns} alternations\n")
    print("| one tower ÷ bare loop | " + " | ".join(ways) + " | synchronisations in ten steps |")
    print("|---|" + "---|" * (len(ways) + 1))
    for case in options.cases.split(","):
        cells = []
        for way in ways:
            try:
                timing = (case, way, options.turns, options.seconds)
                times = mirrored.launch(_one_tower, timing, devices=[options.device])[0]
            except mirrored.TowerFailedError as error:  # the others are still worth knowing
                cells.append(str(error).strip().splitlines()[-1])
                continue
            found = ratios.compare(times["ours"], times["bare"])
            cells.append(f"{found.value:.3f} ({statistics.median(times['ours']) * 1e3:.2f} ms)")
        counts = mirrored.launch(_synchronisations, (case,), devices=[options.device])[0]
        print(f"| {case} | " + " | ".join(cells) + f" | {counts['ours'] - counts['bare']} |", flush=True)
    pair = [options.device] * 2 if device.type != "cpu" else ["cpu:0", "cpu:1"]
    print("\n| two towers that share it ÷ one | |\n|---|---|")
    for case in options.cases.split(","):
        one, two = (
            mirrored.launch(_step_seconds, (case, options.turns, options.seconds), devices=names)[0]
            for names in (pair[:1], pair)
        )
        print(f"| {case} | {statistics.median(two) / statistics.median(one):.2f} |", flush=True)
