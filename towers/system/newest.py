"""The newest of what several loops are at."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Newest(Generic[T]):
    """What loops are at, by their numbers. Loops may end in any order, as two iterators under ``zip`` do."""

    def __init__(self) -> None:
        self._by_loop: dict[int, T] = {}

    def set(self, loop: int, value: T) -> None:
        """The loop has come to a value, which is the newest now."""
        self._by_loop.pop(loop, None)
        self._by_loop[loop] = value

    def end(self, loop: int) -> None:
        """The loop is over."""
        self._by_loop.pop(loop, None)

    @property
    def value(self) -> T | None:
        """The newest value among the loops that are not over."""
        return next(reversed(self._by_loop.values()), None)
