"""The one way to the disk: everything that is written and renamed goes through these few calls.

Tests hand out a disk that fails, or ends the process, at any one of them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import queue
import threading
from collections.abc import Iterable

FILE_MODE = 0o600
FOLDER_MODE = 0o700


class Disk:
    """Calls of the operating system, and what a checkpoint needs that is made of them.

    Errors are ``OSError``, as the system raises them.
    """

    # -- calls -------------------------------------------------------------------------------------------

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

    # -- what is made of them ----------------------------------------------------------------------------

    def write_file(self, path: pathlib.Path, pieces: Iterable[memoryview]) -> tuple[int, str]:
        """Write a new file and see that it is on the disk; returns its size in bytes and its SHA-256.

        Hashing runs beside writing, in a thread.
        """
        size = 0
        descriptor = self.create(path)
        try:
            with _Hasher() as hasher:
                for piece in pieces:
                    hasher.add(piece)
                    size += len(piece)
                    while piece:
                        piece = piece[self.write(descriptor, piece) :]
                self.fsync(descriptor)
        finally:
            os.close(descriptor)
        return size, hasher.digest

    def sync_folder(self, path: pathlib.Path) -> None:
        """See that what was created in, or renamed into, a folder is on the disk."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self.fsync(descriptor)
        finally:
            os.close(descriptor)

    def replace_file(self, path: pathlib.Path, text: str) -> None:
        """Give a small file new contents: whoever reads it finds the old or the new ones, whole."""
        beside = path.with_name(f".{path.name}.new")
        with contextlib.suppress(FileNotFoundError):
            self.unlink(beside)
        self.write_file(beside, [memoryview(text.encode())])
        self.rename(beside, path)
        self.sync_folder(path.parent)

    def remove(self, path: pathlib.Path) -> None:
        """Remove a file, a link, or a folder with all in it; links in it are not followed."""
        if path.is_dir() and not path.is_symlink():
            for entry in path.iterdir():
                self.remove(entry)
            self.rmdir(path)
        else:
            self.unlink(path)


class _Hasher:
    """SHA-256 of what is added, computed in a thread; ``digest`` is there after the ``with`` block."""

    def __init__(self) -> None:
        self._sum = hashlib.sha256()
        self._queue: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="mirrored-checksum", daemon=True)
        self.digest = ""

    def __enter__(self) -> _Hasher:
        self._thread.start()
        return self

    def add(self, piece: memoryview) -> None:
        self._queue.put(piece)

    def _run(self) -> None:
        while (piece := self._queue.get()) is not None:
            self._sum.update(piece)

    def __exit__(self, *_: object) -> None:
        self._queue.put(None)
        self._thread.join()
        self.digest = self._sum.hexdigest()
