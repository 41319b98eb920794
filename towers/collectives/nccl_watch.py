"""Errors that NCCL finds while no host waits for it: a collective that some tower never joins, a tower that has ended.

The host only enqueues collectives between GPUs. torch's watchdog detects that one has timed out or failed, and aborts
the process, without reporting which tower waited for which. This happens a minute later, or, in torch 2.15, at once,
unless it is disabled (see [Note: NCCL must not abort] in :mod:`towers.collectives.nccl`).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable

from towers.health import failure
from towers.health.heartbeat import INTERVAL, main_stack
from towers.system.timeouts import clock


@functools.cache
def watch(failures: Callable[[], Iterable[Exception | None]]) -> None:
    """Starts a thread that checks ``failures`` every second, and ends this process with a report of the first."""
    threading.Thread(target=_run, args=(failures,), name="towers-nccl", daemon=True).start()


def _run(failures: Callable[[], Iterable[Exception | None]]) -> None:
    error = None
    while error is None:
        clock.sleep(INTERVAL)
        error = next(filter(None, failures()), None)
    failure.leave_report(error, f"Stack (most recent call last):\n{main_stack()}\n")
    failure.leave(1)
