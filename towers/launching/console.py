"""Many towers on one terminal: the chief's output unchanged, the others' warnings and errors with the tower's name.

Towers write into named pipes. A :class:`Relay` in the process that started them reads the pipes and prints. No output
is stored on disk unless a copy is requested.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import fcntl
import os
import pathlib
import selectors
import shutil
import stat
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import Any, BinaryIO, TextIO

Sink = Callable[[str], None]

_PREFIX = "towers-job-"


def standard(stream: str) -> Sink:
    """Returns a sink that writes to ``sys.stdout`` or ``sys.stderr`` as it is at that moment (notebooks replace it).

    After a write has failed (no process reads the output any more), the sink writes nothing.
    """
    failed = False

    def write(text: str) -> None:
        nonlocal failed
        target: TextIO = getattr(sys, stream)
        try:
            if not failed:
                target.write(text)
                target.flush()
        except Exception:  # whatever a foreign stream raises
            failed = True

    return write


def leave_terminal() -> None:
    """Discards output to a terminal that has closed, so that printing does not end this process."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        with contextlib.suppress(OSError):
            if stat.S_ISCHR(os.fstat(stream).st_mode):  # isatty() returns False for a closed terminal
                os.dup2(nowhere, stream)
    os.close(nowhere)


def print_while_terminal_lasts(*args: Any, **kwargs: Any) -> None:
    """Prints like ``print``, even if the terminal has closed and SIGHUP has not arrived yet."""
    try:
        print(*args, **kwargs)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        leave_terminal()


_LONGEST = 65536  # characters of a line that is kept until its end arrives


def prefixed_lines(prefix: str, sink: Sink) -> Sink:
    """Returns a sink that prints lines behind a prefix, very long lines in pieces. An empty text ends the last line.

    Overwritten text and the last state of a progress bar (``… [00:01<00:00, 5.2it/s]``) are left out: the bars of N
    towers on one terminal are unreadable, and the chief's own bar is visible.
    """
    unfinished = ""

    def write(text: str) -> None:
        nonlocal unfinished
        *lines, rest = (unfinished + text).split("\n")
        unfinished = rest[max(0, rest.rfind("\r")) :]  # a bar grows for hours
        if unfinished and (not text or len(unfinished) > _LONGEST):
            lines, unfinished = [*lines, unfinished], ""
        if shown := "".join(f"{prefix}{line}\n" for line in map(_undrawn, lines) if line is not None):
            sink(shown)

    return write


def whole_lines(descriptor: int) -> Callable[[bytes], None]:
    """Returns a function that writes to a file in whole lines, very long lines in pieces. Empty data end the last line.

    Programs may write a line in pieces (Python does so with ``PYTHONUNBUFFERED``). Without this, other processes could
    write between them.
    """
    unfinished = b""

    def write(data: bytes) -> None:
        nonlocal unfinished
        unfinished += data
        end = max(unfinished.rfind(b"\n"), unfinished.rfind(b"\r")) + 1
        if not data or len(unfinished) > _LONGEST:
            end = len(unfinished)
        ready, unfinished = unfinished[:end], unfinished[end:]
        while ready:
            ready = ready[os.write(descriptor, ready) :]

    return write


def _decoded(sink: Sink) -> Callable[[bytes], None]:
    """Returns a function that passes bytes to ``sink`` as text."""
    decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode

    def write(data: bytes) -> None:
        text = decode(data)
        if text or not data:
            sink(text)

    return write


def _undrawn(line: str) -> str | None:
    """Returns a line without the progress bar in it, or None if the line is only a progress bar."""
    *drawn_over, last = line.split("\r")
    return None if drawn_over and (not last or last.rstrip().endswith("]")) else last


class _Pipe:
    """One named pipe, the function that writes its contents, and a copy on disk if requested."""

    def __init__(self, path: pathlib.Path, write: Callable[[bytes], None], copy: pathlib.Path | None) -> None:
        os.mkfifo(path, 0o600)
        # Opened for writing, too: otherwise the reader would see the end of the file between two writers.
        self.reader = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._write = write
        self._copy: BinaryIO | None = copy.open("wb", buffering=0) if copy else None
        self._is_open = True

    def drain(self) -> bool:
        """Passes on all data in the pipe, because a full pipe would block the tower.

        Returns:
            Whether more can be passed on. If it cannot, the pipe is closed, and the tower's next write fails.
        """
        while self._is_open:
            try:
                data = os.read(self.reader, 65536)
            except BlockingIOError:
                break
            try:
                if self._copy:
                    self._copy.write(data)
            except OSError:  # a full disk
                self._copy = None
            try:
                self._write(data)
            except OSError:  # no process reads the output any more
                self._close_reader()
        return self._is_open

    def close(self) -> None:
        if self.drain():
            with contextlib.suppress(OSError):
                self._write(b"")
            self._close_reader()
        if self._copy:
            self._copy.close()

    def _close_reader(self) -> None:
        self._is_open = False
        os.close(self.reader)


class Relay:
    """Reads the towers' pipes in a thread and prints their contents. It is a context manager.

    Attributes:
        directory: a private temporary directory that contains the pipes, and exists as long as the relay.
    """

    def __init__(self) -> None:
        _remove_leftovers()
        made = pathlib.Path(tempfile.mkdtemp(prefix=f".{_PREFIX}"))
        self._lock = os.open(made, os.O_RDONLY)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.directory = made.rename(made.with_name(made.name[1:]))  # an unlocked one counts as left over
        self._pipes: list[_Pipe] = []
        self._stop_reader, self._stop_writer = os.pipe()
        self._selector = selectors.DefaultSelector()  # accepts new pipes while the thread waits for it
        self._selector.register(self._stop_reader, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="towers-console", daemon=True)

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def pipe(self, name: str, sink: Sink, copy: pathlib.Path | None = None) -> str:
        """Creates a pipe and returns its path. Data written to it is passed to ``sink`` (and to the file ``copy``)."""
        return self._make_pipe(name, _decoded(sink), copy)

    def _make_pipe(self, name: str, write: Callable[[bytes], None], copy: pathlib.Path | None = None) -> str:
        path = self.directory / f"{len(self._pipes)} {name}"
        pipe = _Pipe(path, write, copy)
        self._pipes.append(pipe)
        self._selector.register(pipe.reader, selectors.EVENT_READ, pipe)
        return str(path)

    def outputs(self, name: str) -> tuple[str | None, str | None]:
        """Returns the pipes for the standard output and standard error of a process whose lines have no prefix.

        None: the process inherits this one's, because it is a terminal. A file or a pipe receives whole lines. If both
        outputs are the same file, they share a pipe, which keeps their order.
        """
        paths: dict[tuple[int, int], str] = {}

        def path_to(descriptor: int) -> str | None:
            try:
                file = os.fstat(descriptor)
            except OSError:  # it is closed
                return None
            key = file.st_dev, file.st_ino
            if not os.isatty(descriptor) and key not in paths:
                paths[key] = self._make_pipe(f"{descriptor} {name}", whole_lines(descriptor))
            return paths.get(key)

        return path_to(1), path_to(2)

    def prefixed(self, stream: str, name: str, copy: pathlib.Path | None = None) -> str:
        """Returns a pipe whose lines are written to ``sys.stdout`` or ``sys.stderr``, each behind ``[name]``."""
        return self.pipe(f"{stream} {name}", prefixed_lines(f"[{name}] ", standard(stream)), copy)

    def _run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                if not key.data.drain():
                    self._selector.unregister(key.fd)

    def __exit__(self, *_: object) -> None:
        os.write(self._stop_writer, b".")
        self._thread.join()
        for pipe in self._pipes:
            pipe.close()
        self._selector.close()
        os.close(self._stop_reader)
        os.close(self._stop_writer)
        shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._lock)


def _remove_leftovers() -> None:
    """Removes the directories of relays that were killed; no process holds their locks."""
    for directory in pathlib.Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(descriptor).st_uid == os.getuid():
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(directory, ignore_errors=True)
            finally:
                os.close(descriptor)
