"""Who watches a run of a script: told what strategies and distributed datasets do, while it is set."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mirrored.data.dataset import DistributedDataset
    from mirrored.data.transfer import Batch
    from mirrored.strategy.base import Strategy
    from towers.system.devices import Device


class Observer:
    """Sees everything and changes nothing; :mod:`mirrored.verification` overrides what it needs."""

    def devices(self, requested: Sequence[Device] | None) -> Sequence[Device] | None:
        """The devices that a strategy takes where the script asks for ``requested``."""
        return requested

    def running(self, strategy: Strategy, fn: Callable[..., Any]) -> Callable[..., Any]:
        """What ``strategy.run`` calls, inside its context, in place of ``fn``."""
        return fn

    def batches(
        self, dataset: DistributedDataset, load: Callable[[int], Iterator[Batch]], first: int
    ) -> Iterator[Batch]:
        """The epoch's batches from number ``first`` on, where ``load(first)`` would be taken."""
        return load(first)

    def folder(self, requested: pathlib.Path) -> pathlib.Path:
        """Where checkpoints are that the script wants in ``requested``."""
        return requested

    def returned(self, call: str, result: Any) -> None:
        """``strategy.reduce`` or ``strategy.gather`` returns ``result``."""


_observer: Observer | None = None
"""One for the process; None but in the processes that ``mirrored.verify`` starts."""


def observer() -> Observer | None:
    """Who watches this process, if anybody does."""
    return _observer


def folder_of(requested: pathlib.Path) -> pathlib.Path:
    """Where checkpoints are that the script wants in ``requested``."""
    return _observer.folder(requested) if _observer is not None else requested


def observe(by: Observer) -> None:
    """From now on, ``by`` is told."""
    global _observer
    _observer = by
