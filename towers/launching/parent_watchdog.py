"""A tower ends when the process that started it is gone, however it went."""

from __future__ import annotations

import functools
import multiprocessing
import os
import signal
import threading
import time
from multiprocessing.connection import wait

from towers.topology import AGENT


@functools.cache
def end_with_parent() -> None:
    """Kill this process as soon as the one that started it has ended.

    Towers of torchrun's agent have sessions of their own, and towers of the fork server are its children, not
    the caller's: no signal reaches them when their starter is killed. A thread watches for them.
    """
    parent = multiprocessing.parent_process()
    if parent is not None:
        sentinel = parent.sentinel

        def watch() -> None:
            wait([sentinel])
            os.kill(os.getpid(), signal.SIGKILL)
    else:
        # Not the parent as it is now: the agent may be gone already.
        started_by = int(os.environ.get(AGENT) or os.getppid())

        def watch() -> None:
            while os.getppid() == started_by:
                time.sleep(0.5)
            os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="towers-lifeline", daemon=True).start()
