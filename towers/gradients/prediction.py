"""Predicting which buckets a backward touches: those of the last backward that followed one like its predecessor."""

from __future__ import annotations

_MAX_PATTERNS = 64

Pattern = tuple[int, ...]


class Prediction:
    """Predicts which buckets backwards touch; equal on all towers, which have seen the same backwards.

    Args:
        everything: what is expected of a backward that nothing is known of.
    """

    def __init__(self, everything: Pattern) -> None:
        self._everything = everything
        self._last: Pattern | None = None
        self._follows: dict[Pattern | None, Pattern] = {}

    def next(self) -> Pattern:
        """The buckets that the next backward will touch."""
        return self._follows.get(self._last, self._everything)

    def learn(self, pattern: Pattern) -> None:
        """Learn which buckets that backward has touched."""
        if len(self._follows) >= _MAX_PATTERNS:
            self._follows.clear()
        self._follows[self._last] = pattern
        self._last = pattern
