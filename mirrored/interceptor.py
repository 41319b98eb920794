"""The interceptor of a script's run, through which ``mirrored verify`` replaces parts of strategies and datasets."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from towers.system.devices import Device


class Interceptor:
    """Replaces nothing. Subclasses in :mod:`mirrored.verification` override methods.

    Code that only observes a training is not an interceptor, but a listener of :mod:`mirrored.events`.

    Attributes:
        compares: whether this run is compared with a run on another number of towers.
    """

    compares = False

    def devices(self, requested: Sequence[Device] | None) -> Sequence[Device] | None:
        """Returns the devices for a strategy of a script that requests ``requested``."""
        return requested

    def asynchronous(self, strategy: str) -> None:
        """Is called with the name of a strategy whose numbers are not those of one device, before it starts."""

    def averaging(self, requested: Any) -> Any:
        """Returns a replacement for the strategy's exact averaging of all gradients in every step, or None."""
        return requested

    def running(self, replica: Any, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the function that ``strategy.run`` calls instead of ``fn``, in the ``ReplicaContext`` ``replica``."""
        return fn

    def batches(self, dataset: object, load: Callable[[int], Iterator[Any]], first: int) -> Iterator[Any]:
        """Returns the batches of a distributed dataset from number ``first`` on, instead of ``load(first)``."""
        return load(first)

    def folder(self, requested: pathlib.Path) -> pathlib.Path:
        """Returns the folder of checkpoints for a script that requests ``requested``."""
        return requested

    def normalises(self, layer: str) -> bool:
        """Returns whether a layer must use the statistics of the global batch instead of those of this tower's share.

        It is not called for torch's own layers, whose calls of torch are watched.
        """
        return False

    def drops(self, dropout: str, value: Any) -> bool:
        """Returns whether a dropout of ``value`` that does not use torch's functions must be left out."""
        return False

    def drew(self, by: str) -> None:
        """Is called when random numbers are drawn without torch's generators."""

    def returned(self, call: str, result: Any) -> None:
        """Is called with the ``result`` of ``strategy.reduce``, ``strategy.gather`` or another ``call``."""


_interceptor = Interceptor()
"""The interceptor of this process. It replaces something only in processes that ``mirrored.verify`` starts."""


def interceptor() -> Interceptor:
    """Returns the interceptor of this process."""
    return _interceptor


def intercept(by: Interceptor) -> None:
    """Makes ``by`` the interceptor of this process."""
    global _interceptor
    _interceptor = by
