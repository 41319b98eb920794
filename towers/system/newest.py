"""The newest value among those of several loops."""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


class Newest(Generic[T]):
    """Values of loops, which may end in any order (two iterators under ``zip`` do) and run in several threads."""

    def __init__(self) -> None:
        self._by_loop: dict[int, T] = {}
        self._begun = 0

    def begin(self) -> int:
        """Returns the index of a loop that starts, from 1."""
        self._begun += 1
        return self._begun

    def set(self, loop: int, value: T) -> None:
        """Sets a loop's value, which is now the newest."""
        self._by_loop.pop(loop, None)
        self._by_loop[loop] = value

    def end(self, loop: int) -> None:
        """Forgets a loop that is over."""
        self._by_loop.pop(loop, None)

    @property
    def value(self) -> T | None:
        """The newest value among the loops that are not over."""
        values = list(self._by_loop.values())  # at once: another thread's loop may start or end at any time
        return values[-1] if values else None
