"""How long a process has waited, leaving out what it was suspended meanwhile (Ctrl-Z, SIGSTOP)."""

from __future__ import annotations

import time


class Patience:
    """Seconds of waiting, counted by whoever looks again and again.

    Args:
        seconds: how many; infinite for no limit.
        longest: between two looks. Where there is more, the process was suspended, and that is left out.
    """

    def __init__(self, seconds: float, longest: float) -> None:
        self._seconds = seconds
        self._longest = longest
        self.start()

    def start(self) -> float:
        """Count from now on; returns all the seconds."""
        self._spent, self._before = 0.0, time.monotonic()
        return self._seconds

    def spend(self) -> float:
        """Look; returns the seconds that are left, below 0 where there are none."""
        now = time.monotonic()
        self._spent += min(now - self._before, self._longest)
        self._before = now
        return self._seconds - self._spent
