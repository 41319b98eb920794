"""POSIX semaphores in shared memory, by which the processes of one host signal each other.

A semaphore does what a flag in shared memory cannot do in Python: the sleep is the kernel's (a futex), so a tower
that waits leaves its core to others, and ``sem_post`` and ``sem_wait`` order memory (POSIX.1-2017, 4.12), so
what one tower wrote before it posted is what another reads after it has waited, on weakly ordered processors too.
"""

from __future__ import annotations

import ctypes
import sys
import time

BYTES = 64
"""Room for one semaphore (glibc takes 32 bytes), a cache line of its own."""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def available() -> bool:
    """Whether this system has semaphores that processes can share (Linux)."""
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
    """Make a semaphore with count 0 in shared memory at ``address``.

    Raises:
        OSError: the system cannot.
    """
    if _blocking.sem_init(address, 1, 0) != 0:
        raise OSError(ctypes.get_errno(), "sem_init failed")


def post(address: int) -> None:
    """Add one to the count; wakes a process that sleeps on it."""
    _immediate.sem_post(address)


def take(address: int) -> bool:
    """Take one from the count if it is not 0; never waits."""
    return bool(_immediate.sem_trywait(address) == 0)


def sleep_until_taken(address: int, seconds: float) -> bool:
    """Take one from the count, sleeping for up to ``seconds`` until there is one. False when there was none."""
    if hasattr(_blocking, "sem_clockwait"):  # by a clock that nobody sets; glibc has it from 2.30 on
        limit = _at(time.clock_gettime(time.CLOCK_MONOTONIC) + seconds)
        return bool(_blocking.sem_clockwait(address, time.CLOCK_MONOTONIC, ctypes.byref(limit)) == 0)
    return bool(_blocking.sem_timedwait(address, ctypes.byref(_at(time.time() + seconds))) == 0)


def _at(moment: float) -> _Timespec:
    return _Timespec(int(moment), int(moment % 1 * 1e9))
