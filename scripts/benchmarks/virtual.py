"""What virtual towers cost: a step of V = N of them against the ordinary one, V = 4 N against accumulating gradients.

The accumulating step splits each tower's share into 4 micro-batches, the first three under ``no_sync``. All variants
live in the same processes and take turns in blocks of steps; medians over the turns. Times are in milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence

import command
import models
import steps
import torch
from plain import Step
from steps import Times, Work

import mirrored

MICRO_BATCHES = 4


def _virtual(work: Work, strategy: mirrored.Strategy) -> Step:
    model, optimizer = work.scoped(strategy)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = strategy.backward(lambda x, y: models.per_example_loss(model(x), y), x, y)
        optimizer.step()
        return loss

    return lambda: strategy.run(train_step, args=(work.x, work.y))


def _accumulating(work: Work) -> Step:
    strategy = work.strategy
    model, optimizer = work.scoped(strategy)

    def backward(x: torch.Tensor, y: torch.Tensor) -> None:
        losses = models.per_example_loss(model(x), y)
        mirrored.compute_average_loss(losses, global_batch_size=work.batch).backward()

    def train_step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        *first, last = zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True)
        with strategy.no_sync():
            for part in first:
                backward(*part)
        backward(*last)
        optimizer.step()

    return lambda: strategy.run(train_step, args=(work.x, work.y))


def _towers(case: str, turns: int, seconds: float, implementation: str) -> Times:
    work = Work(case, steps.strategy(implementation))
    count = work.strategy.num_replicas_in_sync
    equal, more = (steps.strategy(implementation, virtual_towers=v) for v in (count, MICRO_BATCHES * count))
    variants = {
        "ordinary": work.ours(),
        "V = N": _virtual(work, equal),
        "accumulating": _accumulating(work),
        "V = 4 N": _virtual(work, more),
    }
    return steps.alternate(variants, turns, seconds)


def main(arguments: Sequence[str]) -> None:
    chosen = "mlp-64,resnet-8,resnet-64,transformer-16"
    options = command.parser(
        "virtual", __doc__, turns=9, seconds=0.7, cases=models.CASES, chosen=chosen, implementation=True
    ).parse_args(arguments)
    steps.print_head(f"medians of {options.turns} alternations")
    for case in options.cases:
        timing = (case, options.turns, options.seconds, options.implementation)
        times = mirrored.launch(_towers, timing, towers=options.towers)[0]
        for name, base in (("V = N", "ordinary"), ("V = 4 N", "accumulating")):
            steps.print_row(f"{case}: {name} ÷ {base}", times[name], times[base])
