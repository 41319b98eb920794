"""Waiting for what other processes do, and guards against hangs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    """Return when ``condition`` holds; fail when it does not within ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"did not come true within {seconds} s"
        time.sleep(0.05)


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """A guard against hangs, not a measurement: fails when the block took longer."""
    started = time.monotonic()
    yield
    took = time.monotonic() - started
    assert took < seconds, f"took {took:.1f} s, more than {seconds} s"
