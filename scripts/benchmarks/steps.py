"""Training steps to be timed, and timing them in turns, so that each ratio compares neighbours in time."""

from __future__ import annotations

import statistics
import time

import models
import torch
import torch.distributed as dist
from beside import Program
from plain import OPTIMIZERS, MakeOptimizer, Step

import mirrored

Times = dict[str, list[float]]
"""Name of a variant, and its seconds per step, one number a turn."""


def ours(
    strategy: mirrored.Strategy,
    case: str,
    x: torch.Tensor,
    y: torch.Tensor,
    global_batch: int,
    make_optimizer: MakeOptimizer = OPTIMIZERS["sgd"],
) -> Step:
    """A step as the README shows it, on this tower's share of ``global_batch`` examples."""
    with strategy.scope():
        model = models.make(case)
        optimizer = make_optimizer(model.parameters())

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        per_example = models.per_example_loss(model(x), y)
        loss = mirrored.compute_average_loss(per_example, global_batch_size=global_batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return lambda: strategy.run(train_step, args=(x, y))


def alternate(steps: dict[str, Step], turns: int, seconds: float, together: bool) -> Times:
    """Seconds per step of every variant, one number a turn.

    Args:
        seconds: length of one variant's turn, about.
        together: whether several towers do this; they begin and end their turns together.
    """
    for step in steps.values():
        for _ in range(3):
            step()
    _finish(together)
    started = time.perf_counter()
    for step in steps.values():
        step()
    _finish(together)
    block = max(1, round(seconds * len(steps) / (time.perf_counter() - started)))
    if together:
        agreed = torch.tensor(block)
        dist.all_reduce(agreed, op=dist.ReduceOp.MAX)
        block = int(agreed)
    times: Times = {name: [] for name in steps}
    order = list(steps.items())
    for _ in range(turns):
        order.reverse()  # neither variant is always the first
        for name, step in order:
            _finish(together)
            started = time.perf_counter()
            _take(step, block)
            _finish(together)
            times[name].append((time.perf_counter() - started) / block)
    return times


def _take(step: Step, count: int) -> None:
    if isinstance(step, Program):
        step.take(count)
    else:
        for _ in range(count):
            step()


def _finish(together: bool) -> None:
    """Let everything end that was started: the other towers' steps, and a GPU's work."""
    if together:
        dist.barrier()
    elif torch.cuda.is_available():
        torch.cuda.synchronize()


def row(label: str, ours: list[float], other: list[float]) -> str:
    """A line of a table: medians in milliseconds, and the median and the quartiles of the ratios turn by turn."""
    ratios = [a / b for a, b in zip(ours, other, strict=True)]
    medians = "".join(f"{statistics.median(seconds) * 1e3:>9.2f}" for seconds in (ours, other))
    quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    return f"{label:<44}{medians}{statistics.median(ratios):>9.3f}{quartiles[0]:>9.3f}{quartiles[2]:>8.3f}"
