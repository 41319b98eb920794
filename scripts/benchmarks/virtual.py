"""What virtual towers cost: a step of V = N of them against the ordinary one, V = 4 N against accumulating gradients.

The accumulating step splits each tower's share into 4 micro-batches, the first three under ``no_sync``. All variants
live in the same processes and take turns in blocks of steps; medians over the turns. Times are in milliseconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import models
import plain
import steps
import torch
from plain import Step
from steps import Times

import mirrored

MICRO_BATCHES = 4


def _virtual(strategy: mirrored.Strategy, case: str, x: torch.Tensor, y: torch.Tensor) -> Step:
    with strategy.scope():
        model = models.make(case)
        optimizer = plain.OPTIMIZERS["sgd"](model.parameters())

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = strategy.backward(lambda x, y: models.per_example_loss(model(x), y), x, y)
        optimizer.step()
        return loss

    return lambda: strategy.run(train_step, args=(x, y))


def _accumulating(strategy: mirrored.Strategy, case: str, x: torch.Tensor, y: torch.Tensor, batch: int) -> Step:
    with strategy.scope():
        model = models.make(case)
        optimizer = plain.OPTIMIZERS["sgd"](model.parameters())

    def backward(x: torch.Tensor, y: torch.Tensor) -> None:
        losses = models.per_example_loss(model(x), y)
        mirrored.compute_average_loss(losses, global_batch_size=batch).backward()

    def train_step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        *first, last = zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True)
        with strategy.no_sync():
            for part in first:
                backward(*part)
        backward(*last)
        optimizer.step()

    return lambda: strategy.run(train_step, args=(x, y))


def _towers(case: str, turns: int, seconds: float, implementation: str) -> Times:
    options = mirrored.CommunicationOptions(implementation=implementation)
    ordinary = mirrored.MirroredStrategy(communication=options)
    count, batch = ordinary.num_replicas_in_sync, models.CASES[case]
    equal, more = (
        mirrored.MirroredStrategy(communication=options, virtual_towers=v) for v in (count, MICRO_BATCHES * count)
    )
    x, y = models.batch(case, batch // count, seed=ordinary.topology.index)
    found = {
        "ordinary": steps.ours(ordinary, case, x, y, batch),
        "V = N": _virtual(equal, case, x, y),
        "accumulating": _accumulating(ordinary, case, x, y, batch),
        "V = 4 N": _virtual(more, case, x, y),
    }
    return steps.alternate(found, turns, seconds, together=True)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench virtual", description=__doc__)
    parser.add_argument("--cases", default="mlp-64,resnet-8,resnet-64,transformer-16", help="comma-separated")
    parser.add_argument("--towers", type=int, default=2)
    parser.add_argument("--implementation", default="auto", help="auto, gloo, …")
    parser.add_argument("--turns", type=int, default=9, help="alternations")
    parser.add_argument("--seconds", type=float, default=0.7, help="length of one variant's turn")
    options = parser.parse_args(arguments)
    print(f"torch {torch.version.__version__}; medians of {options.turns} alternations")
    print(f"{'':<44}{'ms':>9}{'other':>9}{'ratio':>9}{'25 %':>9}{'75 %':>8}")
    for case in options.cases.split(","):
        timing = (case, options.turns, options.seconds, options.implementation)
        times = mirrored.launch(_towers, timing, towers=options.towers)[0]
        for name, base in (("V = N", "ordinary"), ("V = 4 N", "accumulating")):
            print(steps.row(f"{case}: {name} ÷ {base}", times[name], times[base]), flush=True)
