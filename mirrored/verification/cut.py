"""Ends a script when the steps that are to be compared are made, and leads it to its evaluation."""

from __future__ import annotations

import hashlib
import os
import pathlib
from collections.abc import Callable, Iterator, Sequence

from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from mirrored.context import strategy_with_towers
from mirrored.data.dataset import DistributedDataset, MapDataset
from mirrored.data.transfer import Batch
from mirrored.observer import Observer
from mirrored.verification.trace import Seen
from towers.system.devices import Device
from towers.topology import DEVICES

_MOST_FURTHER = 100


class Enough(BaseException):
    """The script has shown what was to be seen; ends it."""


class Cutter(Observer):
    """Counts the steps of a script's optimizers; ``limit`` of each are enough.

    The loop over a distributed dataset in which an optimizer has made its last step ends as if the epoch were
    over; that step takes the epoch's last batch, whose shares are the likeliest to be uneven. The next step of
    that optimizer ends the script by :class:`Enough`, unless no evaluation has come yet: then further epochs, up to a
    hundred, end after a step each, so that one that follows them all is reached.

    Attributes:
        seen: what was recorded.
        evaluated: whether a module was called outside of training after the last step.
        beyond: whether a further step was made on the batch at hand.

    Args:
        folder: takes the script's checkpoints; empty at the beginning, one for all towers.
        further: whether there may be further epochs.
    """

    def __init__(self, limit: int, folder: str, *, further: bool = True) -> None:
        self.seen = Seen()
        self.evaluated = False
        self.beyond = False
        self._limit = limit
        self._folder = pathlib.Path(folder)
        self._counts: dict[int, int] = {}
        self._datasets: list[DistributedDataset] = []
        self._left = _MOST_FURTHER if further else 0
        self._may_step = False
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)

    def before_step(self, optimizer: Optimizer, compared: bool) -> None:
        """An optimizer is about to make a step that is ``compared``, or a further one."""

    def after_step(self, optimizer: Optimizer, compared: bool) -> None:
        """It has."""

    def over(self, count: int | None = None) -> bool:
        """Whether an optimizer has made as many steps, by default all that are compared."""
        enough = self._limit if count is None else count
        return any(done >= enough for done in self._counts.values())

    def devices(self, requested: Sequence[Device] | None) -> Sequence[Device] | None:
        """The devices of this comparison, whatever the script names."""
        return os.environ[DEVICES].split(",")

    def folder(self, requested: pathlib.Path) -> pathlib.Path:
        """One of our own for each of the script's: both runs begin anew, and the script's own checkpoints stay."""
        return self._folder / hashlib.blake2b(os.path.abspath(requested).encode(), digest_size=8).hexdigest()

    def batches(
        self, dataset: DistributedDataset, load: Callable[[int], Iterator[Batch]], first: int
    ) -> Iterator[Batch]:
        if isinstance(dataset, MapDataset) and dataset not in self._datasets:
            self._datasets.append(dataset)
            self.seen.datasets.append(dataset.examples)
        done_at_first = sum(self._counts.values())
        over_at_first = self.over()
        batches, at = load(first), first
        while (item := next(batches, None)) is not None:
            at += 1
            self._may_step = over_at_first and self._left > 0
            try:
                yield item
            finally:
                self.beyond = False
            steps_here = sum(self._counts.values()) > done_at_first
            if self.over() and (steps_here or not over_at_first):
                self.seen.cut = True
                self._left -= over_at_first
                return
            if steps_here and self.over(self._limit - 1) and isinstance(dataset, MapDataset) and at < len(dataset) - 1:
                at, self.seen.cut = len(dataset) - 1, True
                batches = load(at)

    def _before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if _does_nothing(optimizer):
            return
        compared = self._counts.get(id(optimizer), 0) < self._limit
        if not compared:
            self.seen.cut = self.beyond = True
            if self.evaluated or not self._may_step:
                self.seen.stopped = not self.evaluated
                raise Enough
        self._counts.setdefault(id(optimizer), 0)
        self.before_step(optimizer, compared)

    def _after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if id(optimizer) in self._counts and not _does_nothing(optimizer):
            self._counts[id(optimizer)] += 1
            self.after_step(optimizer, self._counts[id(optimizer)] <= self._limit)


def _does_nothing(optimizer: Optimizer) -> bool:
    """Whether an optimizer has no parameters, or does another's work."""
    strategy = strategy_with_towers()
    parameters = any(group["params"] for group in optimizer.param_groups)
    return not parameters or (strategy is not None and strategy.engine.is_inner_optimizer(optimizer))
