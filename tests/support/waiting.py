"""Waiting for what other processes do, and guards against hangs."""

from __future__ import annotations

import time
from collections.abc import Callable

HANG = 300.0
"""Seconds after which a test takes a wait for a hang: many times what it takes on a machine that does much else, and
less than a collective or a test may take (600 s each; for a test, ``_LONGEST`` in tests/support/guard.py)."""


def wait_until(condition: Callable[[], bool], seconds: float = HANG) -> None:
    """Return when ``condition`` holds; fail when it does not within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"did not come true within {seconds} s"
        time.sleep(0.05)


def forever() -> None:
    """Return never: for what the end of its process has to end.

    In short sleeps: a signal that comes while the process is continued may go to another thread, and wakes no sleeper.
    """
    while True:
        time.sleep(0.1)
