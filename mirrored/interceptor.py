"""The interceptor of a run of a script: what ``mirrored verify`` replaces in strategies and datasets, and is told."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from towers.system.devices import Device


class Interceptor:
    """Replaces nothing; :mod:`mirrored.verification` overrides what it needs.

    What only follows a training is no interceptor but a listener of :mod:`mirrored.events`.

    Attributes:
        compares: whether this run is compared with one of another number of towers.
    """

    compares = False

    def devices(self, requested: Sequence[Device] | None) -> Sequence[Device] | None:
        """The devices that a strategy takes where the script asks for ``requested``."""
        return requested

    def averaging(self, requested: Any) -> Any:
        """What a strategy does in place of averaging all gradients in every step, and exactly; None: nothing."""
        return requested

    def running(self, replica: Any, fn: Callable[..., Any]) -> Callable[..., Any]:
        """The function that ``strategy.run`` calls in place of ``fn``, in the ``ReplicaContext`` ``replica``."""
        return fn

    def batches(self, dataset: object, load: Callable[[int], Iterator[Any]], first: int) -> Iterator[Any]:
        """The batches that a distributed dataset yields in place of ``load(first)``, those from number ``first`` on."""
        return load(first)

    def folder(self, requested: pathlib.Path) -> pathlib.Path:
        """The folder of checkpoints that a script gets where it asks for ``requested``."""
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


_interceptor = Interceptor()
"""One for the process; it replaces nothing but in the processes that ``mirrored.verify`` starts."""


def interceptor() -> Interceptor:
    """The interceptor of this process."""
    return _interceptor


def intercept(by: Interceptor) -> None:
    """Make ``by`` the interceptor of this process."""
    global _interceptor
    _interceptor = by
