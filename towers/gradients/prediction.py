"""Which buckets a backward will touch: those that the backward touched that followed the same one before."""

from __future__ import annotations

_MAX_PATTERNS = 64

Pattern = tuple[int, ...]


class Prediction:
    """Equal on all towers, for all have seen the same backwards.

    Args:
        everything: what is expected of a backward that nothing is known of.
    """

    def __init__(self, everything: Pattern) -> None:
        self._everything = everything
        self._last: Pattern | None = None
        self._follows: dict[Pattern | None, Pattern] = {}

    def next(self) -> Pattern:
        """What the next backward will touch."""
        return self._follows.get(self._last, self._everything)

    def learn(self, pattern: Pattern) -> None:
        """That backward is over, and has touched this."""
        if len(self._follows) >= _MAX_PATTERNS:
            self._follows.clear()
        self._follows[self._last] = pattern
        self._last = pattern
