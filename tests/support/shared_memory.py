"""What lies in /dev/shm."""

from __future__ import annotations

import os
import time

from tests.support.waiting import HANG


def names() -> set[str]:
    """All names there, but for the semaphores of other programs that come and go."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def left(before: set[str]) -> list[str]:
    """The names that were not there ``before`` and stay. What other data loaders pass on has one for a moment."""
    new = names() - before
    deadline = time.monotonic() + HANG
    while new and time.monotonic() < deadline:
        time.sleep(0.05)
        new &= names()
    return sorted(new)
