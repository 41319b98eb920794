"""Training steps to be timed, and timing them in turns, so that each ratio compares neighbours in time."""

from __future__ import annotations

import statistics
import time

import models
import ratios
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
    blocks = {name: _steps_in(seconds, step, together) for name, step in steps.items()}
    times: Times = {name: [] for name in steps}
    order = list(steps.items())
    for _ in range(turns):
        order.reverse()  # neither variant is always the first
        for name, step in order:
            _finish(together)
            started = time.perf_counter()
            _take(step, blocks[name])
            _finish(together)
            times[name].append((time.perf_counter() - started) / blocks[name])
    return times


def _steps_in(seconds: float, step: Step, together: bool) -> int:
    """How many steps take about ``seconds``, the same on all towers; after a few to warm up."""
    _take(step, 3)
    count = 1
    while True:
        _finish(together)
        started = time.perf_counter()
        _take(step, count)
        took = torch.tensor(time.perf_counter() - started)
        if together:
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
        if took > seconds / 20:
            return max(1, round(seconds * count / float(took)))
        count *= 4


def _take(step: Step, count: int) -> None:
    if isinstance(step, Program):
        step.take(count)
    else:
        for _ in range(count):
            step()


def _finish(together: bool) -> None:
    """Let everything end that was started: a GPU's work, and the other towers' steps."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    if together:
        dist.barrier()


def row(label: str, ours: list[float], other: list[float]) -> str:
    """A line of a table: medians in milliseconds, and the median and the quartiles of the ratios turn by turn."""
    medians = "".join(f"{statistics.median(seconds) * 1e3:>9.2f}" for seconds in (ours, other))
    found = ratios.compare(ours, other)
    return f"{label:<44}{medians}{found.value:>9.3f}{found.low:>9.3f}{found.high:>8.3f}"
