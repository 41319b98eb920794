"""POSIX semaphores in shared memory, with which the processes of one host signal each other.

A semaphore provides two features that a flag in shared memory cannot have in Python. The kernel puts the process to
sleep (a futex), so a waiting tower leaves its core to others. And ``sem_post`` and ``sem_wait`` order memory
(POSIX.1-2017, 4.12): a tower that has waited reads the data that another tower wrote before it posted, even on weakly
ordered processors.
"""

from __future__ import annotations

import ctypes
import sys
import time

BYTES = 64
"""Size of one semaphore's place (glibc needs 32 bytes): a full cache line."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def available() -> bool:
    """Returns whether this system has semaphores that processes can share (Linux)."""
    return sys.platform.startswith("linux") and hasattr(_blocking, "sem_timedwait")


def _declare(library: ctypes.CDLL) -> ctypes.CDLL:
    if hasattr(library, "sem_timedwait"):
        library.sem_init.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)
        library.sem_post.argtypes = library.sem_trywait.argtypes = (ctypes.c_void_p,)
        library.sem_timedwait.argtypes = (ctypes.c_void_p, ctypes.POINTER(_Timespec))
    if hasattr(library, "sem_clockwait"):
        library.sem_clockwait.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Timespec))
    return library


_blocking = _declare(ctypes.CDLL(None, use_errno=True))  # lets other threads run
_immediate = _declare(ctypes.PyDLL(None))  # for calls that take less time than that


def create(address: int) -> None:
    """Creates a semaphore with count 0 in shared memory at ``address``.

    Raises:
        OSError: the system cannot.
    """
    if _blocking.sem_init(address, 1, 0) != 0:
        raise OSError(ctypes.get_errno(), "sem_init failed")


def post(address: int) -> None:
    """Adds one to the count, and wakes a process that sleeps on it."""
    _immediate.sem_post(address)


def take(address: int) -> bool:
    """Takes one from the count if it is not 0, and returns whether it did. It never waits."""
    return bool(_immediate.sem_trywait(address) == 0)


def sleep_until_taken(address: int, seconds: float) -> bool:
    """Takes one from the count, sleeping for up to ``seconds`` until there is one, and returns whether it did."""
    if hasattr(_blocking, "sem_clockwait"):  # uses a clock that cannot be set; in glibc from 2.30 on
        limit = _at(time.clock_gettime(time.CLOCK_MONOTONIC) + seconds)
        return bool(_blocking.sem_clockwait(address, time.CLOCK_MONOTONIC, ctypes.byref(limit)) == 0)
    return bool(_blocking.sem_timedwait(address, ctypes.byref(_at(time.time() + seconds))) == 0)


def _at(moment: float) -> _Timespec:
    return _Timespec(int(moment), int(moment % 1 * 1e9))
