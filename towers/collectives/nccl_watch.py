"""What NCCL finds out while no host waits for it: a collective that some tower never joins, a tower that is gone.

The host only enqueues collectives between GPUs. A watchdog of torch's finds that one has taken too long or has failed,
and a minute later aborts the process, which by then says nothing of who waits for whom.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterable

from towers.health import failure
from towers.health.heartbeat import INTERVAL, main_stack


@functools.cache
def watch(failures: Callable[[], Iterable[Exception | None]]) -> None:
    """From now on, end this process with a report of the first of ``failures``, which are looked for every second."""
    threading.Thread(target=_run, args=(failures,), name="towers-nccl", daemon=True).start()


def _run(failures: Callable[[], Iterable[Exception | None]]) -> None:
    error = None
    while error is None:
        time.sleep(INTERVAL)
        error = next(filter(None, failures()), None)
    failure.leave_report(error, f"Stack (most recent call last):\n{main_stack()}\n")
    failure.leave(1)
