"""Training steps to be timed, and timing them in turns, so that each ratio compares neighbours in time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import models
import plain
import torch
import torch.distributed as dist
from beside import Program
from plain import Forward, MakeOptimizer, Step
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import mirrored

Times = dict[str, list[float]]
"""Name of a variant, and its seconds per step, one number a turn."""


def strategy(
    implementation: str, kind: type[mirrored.MirroredStrategy] = mirrored.MirroredStrategy, **options: Any
) -> mirrored.Strategy:
    """A strategy whose towers communicate by an implementation."""
    return kind(communication=mirrored.CommunicationOptions(implementation=implementation), **options)


class Work:
    """A case on this tower, with steps of it.

    Args:
        share: examples of this tower; default: its part of the case's batch.
    """

    def __init__(
        self, case: str, strategy: mirrored.Strategy, optimizer: str = "sgd", share: int | None = None
    ) -> None:
        torch.manual_seed(0)
        count = strategy.num_replicas_in_sync
        share = models.CASES[case] // count if share is None else share
        self.case, self.strategy, self.batch = case, strategy, share * count
        self.make_optimizer = plain.OPTIMIZERS[optimizer]
        x, y = models.batch(case, share, seed=strategy.topology.index)
        self.x, self.y = x.to(strategy.device), y.to(strategy.device)

    def make(self) -> nn.Module:
        """The model of the case, on the CPU."""
        return models.make(self.case)

    def model(self) -> nn.Module:
        """A model without mirrored."""
        return self.make().to(self.strategy.device)

    def scoped(
        self, strategy: mirrored.Strategy, shards: Mapping[str, Any] | None = None, **scope: Any
    ) -> tuple[nn.Module, Optimizer]:
        """A model of a strategy, and its optimizer.

        Args:
            shards: the options of ``strategy.shard``, which shards the model. None: it is mirrored.
        """
        with strategy.scope(**scope):
            model = self.make()
        if shards is not None:
            strategy.shard(model, models.units(self.case), **shards)
        return model, self.make_optimizer(model.parameters())

    def ours(
        self,
        strategy: mirrored.Strategy | None = None,
        forward_of: Callable[[nn.Module], Forward] = lambda model: model,
        shards: Mapping[str, Any] | None = None,
        **scope: Any,
    ) -> Step:
        """A step as the README shows it.

        Args:
            strategy: another one.
            forward_of: how a model is called.
            shards: see :meth:`scoped`.
            scope: options of its scope.
        """
        strategy = strategy or self.strategy
        model, optimizer = self.scoped(strategy, shards, **scope)
        forward, batch = forward_of(model), self.batch

        def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            per_example = models.per_example_loss(forward(x), y)
            loss = mirrored.compute_average_loss(per_example, global_batch_size=batch)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return lambda: strategy.run(train_step, args=(self.x, self.y))

    def bare(self, forward_of: Callable[[nn.Module], Forward] = lambda model: model) -> Step:
        """The same without mirrored, and without communication."""
        model = self.model()
        return plain.step(forward_of(model), model.parameters(), self.x, self.y, self.make_optimizer)

    def fully_sharded(self, strategy: mirrored.Strategy | None = None) -> Step:
        """Our step of a model that ``strategy.shard`` shards."""
        return self.ours(strategy, shards={})

    def fsdp(self, **options: Any) -> Step:
        """The same with torch's ``fully_shard`` alone."""
        model = self.model()
        for layer in [layer for layer in model.modules() if isinstance(layer, tuple(models.units(self.case)))]:
            fully_shard(layer, **options)
        fully_shard(model, **options)
        return plain.step(model, model.parameters(), self.x, self.y, self.make_optimizer)

    def ddp(self, make_optimizer: MakeOptimizer | None = None, **options: Any) -> Step:
        """The same with DDP."""
        model = DistributedDataParallel(self.model(), gradient_as_bucket_view=True, **options)
        return plain.step(model, model.parameters(), self.x, self.y, make_optimizer or self.make_optimizer)


def alternate(
    steps: Mapping[str, Step], turns: int, seconds: float, before_turn: Callable[[], object] | None = None
) -> Times:
    """Seconds per step of every variant, one number a turn; several towers begin and end their turns together.

    Args:
        seconds: length of one variant's turn, about; 0 for a single step.
        before_turn: is called before a turn, and counts for nobody.
    """
    blocks = {name: _steps_in(seconds, step) for name, step in steps.items()}
    times: Times = {name: [] for name in steps}
    order = list(steps.items())
    for _ in range(turns):
        order.reverse()  # neither variant is always the first
        for name, step in order:
            if before_turn is not None:
                before_turn()
            finish()
            started = time.perf_counter()
            _take(step, blocks[name])
            finish()
            times[name].append((time.perf_counter() - started) / blocks[name])
    return times


def _steps_in(seconds: float, step: Step) -> int:
    """How many steps take about ``seconds``, the same on all towers; after some to warm up."""
    _take(step, 3 if seconds else 1)
    count = 1
    while seconds:
        finish()
        started = time.perf_counter()
        _take(step, count)
        took = torch.tensor(time.perf_counter() - started)
        if _together():
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
        if took > seconds / 20:
            return max(1, round(seconds * count / float(took)))
        count *= 4
    return count


def _take(step: Step, count: int) -> None:
    if isinstance(step, Program):
        step.take(count)
    else:
        for _ in range(count):
            step()


def finish() -> None:
    """Let everything end that was started: a GPU's work, and the other towers' steps."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    if _together():
        dist.barrier()


def _together() -> bool:
    """Whether several towers take these steps."""
    return dist.is_initialized() and dist.get_world_size() > 1


@dataclass(frozen=True)
class Ratio:
    """Median and quartiles over the turns."""

    value: float
    low: float
    high: float


def ratio_of(ones: Sequence[float], others: Sequence[float]) -> Ratio:
    """The ratio of two variants that took turns: each turn compares neighbours in time."""
    ratios = [one / other for one, other in zip(ones, others, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Ratio(statistics.median(ratios), low, high)


def print_head(about: str) -> None:
    """The lines above those of :func:`print_row`."""
    print(f"torch {torch.version.__version__}; {about}")
    print(f"{'':<44}{'ms':>9}{'other':>9}{'ratio':>9}{'25 %':>9}{'75 %':>8}")


def print_row(label: str, ours: list[float], other: list[float]) -> Ratio:
    """Print medians in milliseconds, and the median and the quartiles of the ratios turn by turn."""
    medians = "".join(f"{statistics.median(seconds) * 1e3:>9.2f}" for seconds in (ours, other))
    ratio = ratio_of(ours, other)
    print(f"{label:<44}{medians}{ratio.value:>9.3f}{ratio.low:>9.3f}{ratio.high:>8.3f}", flush=True)
    return ratio
