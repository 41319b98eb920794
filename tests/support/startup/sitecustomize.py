"""Every Python that the tests start runs this first.

It looks for garbage rarely, and not at all when it ends: loading torch and its compiler makes a million objects that
stay. Without that, ``pytest tests/launching/test_start.py tests/launching/test_fork_server.py`` takes a fifth more of a
core (148 s, not 123).

It writes its stacks to a file when the guard of the tests asks for them (:mod:`tests.support.guard`).
"""

import atexit
import faulthandler
import fcntl
import gc
import os
import signal
import sys

_FIRST_DESCRIPTOR = 500  # that stays out of the way of what a program opens


def _end() -> None:
    if "triton" not in sys.modules:  # which prints all that it finds alive at the end
        gc.freeze()


def _show_stacks(file: str) -> None:
    try:
        opened = os.open(file, os.O_WRONLY | os.O_APPEND)
        descriptor = fcntl.fcntl(opened, fcntl.F_DUPFD_CLOEXEC, _FIRST_DESCRIPTOR)
        os.close(opened)
        faulthandler.register(signal.SIGRTMAX - 2, descriptor, all_threads=True)
    except OSError:  # another user's file, or few descriptors
        pass


gc.set_threshold(100_000, 20, 100)
atexit.register(_end)
if "TESTS_STACKS" in os.environ:
    _show_stacks(os.environ["TESTS_STACKS"])
