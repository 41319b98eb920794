"""Shutdown: a tower destroys its process groups before its interpreter ends."""

from __future__ import annotations

import atexit
import functools
import logging
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import torch.distributed as dist

from towers.collectives.process_group import open_communicators
from towers.health import failure
from towers.system.log import get_logger

log = get_logger("towers")

_LEAVING_SECONDS = 60.0


def leave_at_exit(*, may_hang: bool) -> None:
    """Destroy the groups before the interpreter is torn down.

    Gloo's threads may still release the last collective's tensors, for which they need the interpreter; a process
    that ends meanwhile is aborted (seen with torch 2.13). Destroying the groups joins these threads.

    NCCL then waits for all towers, also for one that has ended or is busy, and for CUDA graphs that hold collectives.
    Its destructors would, too, so a process that cannot shut down in time ends without them, and without the other
    exit handlers that are left.

    Args:
        may_hang: whether there is NCCL.
    """
    said = _exit_code_of_script() if may_hang else lambda: 0
    ending = threading.Event()

    def leave_when_ending() -> None:
        ending.wait()
        leave_process_group()

    # Started now: some versions of Python (3.12.0 to 3.12.2) start no threads at exit.
    leaving = threading.Thread(target=leave_when_ending, name="towers-leave", daemon=True)
    leaving.start()

    def leave() -> None:
        error = getattr(sys, "last_value", None)  # its report has been written by now
        told = max((communicator.health.exit_code for communicator in list(open_communicators)), default=0)
        ending.set()
        leaving.join(1.0 if error is not None else _LEAVING_SECONDS if may_hang else None)
        if not leaving.is_alive() or not may_hang:
            return
        logging.shutdown()
        if error is None:
            log.warning(
                "the process groups could not be destroyed within %.0f s: another tower has not ended yet, or there is "
                "a CUDA graph that holds collectives (delete it before the program ends); ending without it",
                _LEAVING_SECONDS,
            )
            failure.leave(told or said())
        failure.leave(128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1)

    atexit.register(leave)


def _exit_code_of_script() -> Callable[[], int]:
    """From now on, remember what ``sys.exit`` is called with; returns what tells the exit code that it gives."""
    given: list[Any] = [None]
    leave = sys.exit

    @functools.wraps(leave)
    def remember(status: Any = None, /) -> NoReturn:
        given[0] = status
        leave(status)

    sys.exit = remember  # the interpreter keeps a SystemExit to itself
    return lambda: given[0] if isinstance(given[0], int) else int(given[0] is not None)


def leave_process_group() -> None:
    """Destroy all groups; no communicator can be used afterwards."""
    for communicator in list(open_communicators):
        communicator.close()
    if dist.is_initialized():
        dist.destroy_process_group()
