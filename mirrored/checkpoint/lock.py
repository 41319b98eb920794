"""The lock of a folder of checkpoints.

[Note: the lock of a process] Only one process at a time writes into a folder, with any number of managers. The kernel
releases a POSIX lock when its process ends, for any reason. (A ``flock`` would be kept by data loader processes whose
parent was killed.) A POSIX lock is also released when the process closes any descriptor of the file. So a process opens
the lock file once, and all holders share one :class:`FolderLock`.
"""

from __future__ import annotations

import fcntl
import os
import pathlib
import threading
import weakref
from typing import Any

from mirrored.checkpoint.folder import FILE_MODE
from towers.system.timeouts import Deadline, clock


class FolderLock:
    """The lock file of a folder. This process holds the lock until it ends, or until this object is collected.

    Attributes:
        writers: the writers of this process that have trained or saved here, the newest last.
    """

    def __init__(self, path: pathlib.Path) -> None:
        self.writers: list[weakref.ref[Any]] = []
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        weakref.finalize(self, os.close, descriptor)


_locks: weakref.WeakValueDictionary[tuple[int, int, int], FolderLock] = weakref.WeakValueDictionary()
"""The locks of this process, by process id (a forked child holds none), device and inode."""

# Without it, two threads that find no lock would both take one, and the first that releases its lock would release the
# other's.
_taking = threading.Lock()


def take_lock(path: pathlib.Path, patience: float = 0.0) -> tuple[FolderLock, bool]:
    """Returns this process's lock on a file, and whether the lock is new. The file is created if it does not exist.

    Args:
        patience: seconds to wait for another process that holds the lock.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the file cannot be opened.
    """
    deadline = Deadline(patience)
    while True:
        try:
            with _taking:  # see [Note: the lock of a process]; another thread may have taken the lock
                if path.exists() and (lock := _locks.get(_key(path))) is not None:
                    return lock, False
                lock = _locks[_key(path)] = FolderLock(path)
                return lock, True
        except BlockingIOError:
            if deadline.has_passed():
                raise
            clock.sleep(0.1)


def _key(path: pathlib.Path) -> tuple[int, int, int]:
    status = os.lstat(path)
    return os.getpid(), status.st_dev, status.st_ino
