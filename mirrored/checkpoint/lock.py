"""The lock of a folder of checkpoints.

[Note: the lock of a process] One process at a time writes into a folder, by as many managers as it likes. POSIX locks
end with their process, however it ends. (Those of ``flock`` live on in data loaders' processes after their parent was
killed.) POSIX locks also end when the process closes any descriptor of the file. So a process opens the lock file once,
and all its holders share one :class:`FolderLock`.
"""

from __future__ import annotations

import fcntl
import os
import pathlib
import threading
import weakref

from mirrored.checkpoint.folder import FILE_MODE
from towers.system.timeouts import Deadline, clock


class FolderLock:
    """The lock file of a folder, held by this process until it ends or nobody references this object."""

    def __init__(self, path: pathlib.Path) -> None:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            raise
        weakref.finalize(self, os.close, descriptor)


_locks: weakref.WeakValueDictionary[tuple[int, int, int], FolderLock] = weakref.WeakValueDictionary()
"""The locks of this process, by process id (a forked child holds none), device and inode."""

# Of two threads that both find no lock, each would take one, and the first to let go of its own would end the other's.
_taking = threading.Lock()


def take_lock(path: pathlib.Path, patience: float = 0.0) -> tuple[FolderLock, bool]:
    """This process's lock on a file, which is made where it is missing; and whether the lock is new.

    Args:
        patience: seconds to wait for another process that holds it.

    Raises:
        BlockingIOError: another process holds it.
        OSError: the file cannot be opened.
    """
    deadline = Deadline(patience)
    while True:
        try:
            with _taking:  # see [Note: the lock of a process]; another thread may have taken it
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
