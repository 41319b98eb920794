"""One process at a time writes into a folder of checkpoints, by as many managers as it likes.

[Note: the lock of a process] POSIX locks end with their process, however it ends. (Those of ``flock`` live on in the
processes that load data, after this one was killed.) They also end when the process closes any descriptor of the file.
So a process opens it once, and those who hold the lock share it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pathlib
import weakref

from mirrored.checkpoint.disk import FILE_MODE


class Lock:
    """This process writes into a folder, until it ends or nobody has this object any more."""

    def __init__(self, path: pathlib.Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        weakref.finalize(self, os.close, descriptor)


_held: weakref.WeakValueDictionary[tuple[int, int, int], Lock] = weakref.WeakValueDictionary()
"""The locks of this process, as the system has them: by process (a forked child has none) and file."""


def take(path: pathlib.Path) -> tuple[Lock, bool]:
    """The lock of this process on a file, which is made where it is missing; and whether it is new.

    Raises:
        BlockingIOError: another process has it.
        OSError: the file cannot be opened.
    """
    with contextlib.suppress(FileNotFoundError):
        if (lock := _held.get(_key(path))) is not None:
            return lock, False
    lock = Lock(path)
    _held[_key(path)] = lock
    return lock, True


def _key(path: pathlib.Path) -> tuple[int, int, int]:
    found = os.lstat(path)
    return os.getpid(), found.st_dev, found.st_ino
