"""Access to the disk: all writes and renames go through :class:`Disk`, whose calls tests let fail or kill the process.

[Note: the lock of a process] One process at a time writes into a folder, by as many managers as it likes. POSIX locks
end with their process, however it ends. (Those of ``flock`` live on in data loaders' processes after their parent was
killed.) POSIX locks also end when the process closes any descriptor of the file. So a process opens the lock file once,
and all its holders share one :class:`FolderLock`.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pathlib
import queue
import threading
import weakref
from collections.abc import Iterable

FILE_MODE = 0o600
FOLDER_MODE = 0o700


class Disk:
    """System calls, and the operations of checkpoints that are made of them. All errors are ``OSError``."""

    def create(self, path: pathlib.Path) -> int:
        """Open a new file for writing; it must not exist. Readable by its owner only, or less where umask says so."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE)

    def write(self, descriptor: int, data: memoryview) -> int:
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def mkdir(self, path: pathlib.Path) -> None:
        os.mkdir(path, FOLDER_MODE)

    def rename(self, old: pathlib.Path, new: pathlib.Path) -> None:
        os.rename(old, new)

    def unlink(self, path: pathlib.Path) -> None:
        os.unlink(path)

    def rmdir(self, path: pathlib.Path) -> None:
        os.rmdir(path)

    def write_file(self, path: pathlib.Path, pieces: Iterable[memoryview]) -> tuple[int, str]:
        """Write a new file and flush it to the disk; returns its size in bytes and its SHA-256.

        Hashing runs beside writing, in a thread.
        """
        size, checksum = 0, hashlib.sha256()
        to_hash: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()

        def hash_pieces() -> None:
            for piece in iter(to_hash.get, None):
                checksum.update(piece)

        with contextlib.ExitStack() as stack:
            descriptor = self.create(path)
            stack.callback(os.close, descriptor)
            # An executor takes no work after the main thread's end, when the last checkpoint may still be written.
            hashing = threading.Thread(target=hash_pieces, name="mirrored-checksum", daemon=True)
            hashing.start()
            stack.callback(hashing.join)
            stack.callback(to_hash.put, None)
            for piece in pieces:
                to_hash.put(piece)
                size += len(piece)
                while piece:
                    piece = piece[self.write(descriptor, piece) :]
            self.fsync(descriptor)
        return size, checksum.hexdigest()

    def sync_folder(self, path: pathlib.Path) -> None:
        """Flush the entries of a folder to the disk: files created in it, or renamed into it."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.fsync(descriptor)
        finally:
            os.close(descriptor)

    def replace_file(self, path: pathlib.Path, text: str) -> None:
        """Replace the contents of a small file atomically: a reader finds the old or the new ones, whole."""
        beside = path.with_name(f".{path.name}.new")
        with contextlib.suppress(FileNotFoundError):
            self.unlink(beside)
        self.write_file(beside, [memoryview(text.encode())])
        self.rename(beside, path)
        self.sync_folder(path.parent)

    def remove(self, path: pathlib.Path) -> None:
        """Remove a file, a link, or a folder with its contents; links in it are not followed."""
        if path.is_dir() and not path.is_symlink():
            for entry in path.iterdir():
                self.remove(entry)
            self.rmdir(path)
        else:
            self.unlink(path)


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


_held: weakref.WeakValueDictionary[tuple[int, int, int], FolderLock] = weakref.WeakValueDictionary()
"""The locks of this process, by process id (a forked child holds none), device and inode."""


def take_lock(path: pathlib.Path) -> tuple[FolderLock, bool]:
    """This process's lock on a file, which is made where it is missing; and whether the lock is new.

    Raises:
        BlockingIOError: another process holds it.
        OSError: the file cannot be opened.
    """
    with contextlib.suppress(FileNotFoundError):
        if (lock := _held.get(_key(path))) is not None:  # see [Note: the lock of a process]
            return lock, False
    lock = FolderLock(path)
    _held[_key(path)] = lock
    return lock, True


def _key(path: pathlib.Path) -> tuple[int, int, int]:
    status = os.lstat(path)
    return os.getpid(), status.st_dev, status.st_ino
