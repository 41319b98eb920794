"""Predicts the buckets that a backward touches: those of the backward that last followed the same predecessor."""

from __future__ import annotations

_MAX_PATTERNS = 64

Pattern = tuple[int, ...]


class Prediction:
    """Predicts the buckets that backwards touch. It is equal on all towers, which have seen the same backwards.

    Args:
        everything: the expected buckets of an unknown backward.
    """

    def __init__(self, everything: Pattern) -> None:
        self._everything = everything
        self._last: Pattern | None = None
        self._follows: dict[Pattern | None, Pattern] = {}

    def next(self) -> Pattern:
        """Returns the buckets that the next backward will touch."""
        return self._follows.get(self._last, self._everything)

    def learn(self, pattern: Pattern) -> None:
        """Records the buckets that the backward has touched."""
        if len(self._follows) >= _MAX_PATTERNS:
            self._follows.clear()
        self._follows[self._last] = pattern
        self._last = pattern
