"""The observer of a run of a script: strategies and distributed datasets report to it while it is set."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from towers.system.devices import Device


class Observer:
    """Sees everything and changes nothing; :mod:`mirrored.verification` overrides what it needs."""

    def devices(self, requested: Sequence[Device] | None) -> Sequence[Device] | None:
        """The devices that a strategy takes where the script asks for ``requested``."""
        return requested

    def running(self, replica: Any, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The function that ``strategy.run`` calls in place of ``fn``, in the ``ReplicaContext`` ``replica``."""
        return fn

    def batches(self, dataset: object, load: Callable[[int], Iterator[Any]], first: int) -> Iterator[Any]:
        """The batches that a distributed dataset yields in place of ``load(first)``, those from number ``first`` on."""
        return load(first)

    def folder(self, requested: pathlib.Path) -> pathlib.Path:
        """The folder of checkpoints that the script wants in ``requested``."""
        return requested

    def normalises(self, layer: str) -> bool:
        """Whether a layer that takes statistics of this tower's share is to take those of the global batch instead.

        torch's own layers are watched where they call torch.
        """
        return False

    def drops(self, dropout: str, value: Any) -> bool:
        """Whether a dropout of ``value`` by other means than torch's is to be left out."""
        return False

    def drew(self, by: str) -> None:
        """Random numbers are drawn by other means than torch's generators."""

    def returned(self, call: str, result: Any) -> None:
        """``strategy.reduce`` or ``strategy.gather`` returns ``result``, or what ``call`` says."""


_observer: Observer | None = None
"""One for the process; None but in the processes that ``mirrored.verify`` starts."""


def observer() -> Observer | None:
    """The observer of this process; None where there is none."""
    return _observer


def folder_of(requested: pathlib.Path) -> pathlib.Path:
    """The folder of checkpoints that the script wants in ``requested``."""
    return _observer.folder(requested) if _observer is not None else requested


def observe(by: Observer) -> None:
    """From now on, ``by`` observes this process."""
    global _observer
    _observer = by
