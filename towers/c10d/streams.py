"""Streams of letters from one tower to another, through memory of the sender's that the receiver maps.

Letters lie one behind the other. When a piece of memory is full and all in it was taken, the sender begins again at its
start; when not all was taken, it goes on in a new piece, whose number it leaves in the old one. So a sender always
finds room, and a receiver who never comes costs memory, not time.

Two semaphores tell either side how far the other is, since only they order memory
(:mod:`towers.collectives.shared_memory.semaphores`): one counts letters that were sent, the other letters that were
taken.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from towers.collectives.shared_memory import semaphores
from towers.collectives.shared_memory.segment import ALIGNMENT, Segment, aligned
from towers.errors import PeerLostError

FIRST = 2**16
"""Bytes of a stream's first piece of memory."""

_NEXT = 2**20  # bytes of the next ones, at least
_HEAD = ALIGNMENT  # bytes of a letter's head: three integers, what follows and two about it
_LETTER, _AGAIN, _ELSEWHERE = 1, 2, 3
_NAP = 0.1  # seconds between two looks whether the receiver lives


@dataclass
class Letter:
    """A message in the memory of its sender, where it stays until it was taken.

    Attributes:
        content: flat, bytes.
    """

    source: int
    tag: int
    content: Tensor


class Sender:
    """The end of a stream that letters are put into.

    Args:
        segment, start: where the first piece of memory lies, :data:`FIRST` bytes long.
        sent, taken: addresses of the semaphores.
        bell: address of a semaphore that the receiver sleeps on.
    """

    def __init__(self, segment: Segment, start: int, sent: int, taken: int, bell: int) -> None:
        self._segment, self._start, self._end, self._at = segment, start, start + FIRST, start
        self._sent, self._taken, self._bell = sent, taken, bell
        self._unread = self._count = 0
        self._offered: list[tuple[int, Segment]] = []  # pieces to be mapped by the receiver, and the letter it needs

    def put(self, content: Tensor, tag: int) -> None:
        """Send a copy of ``content`` (flat, bytes); never waits.

        Raises:
            OSError: there is no memory for it.
        """
        while semaphores.take(self._taken):
            self._unread -= 1
        self._close_files()
        needed = _HEAD + aligned(content.numel())
        if self._at + needed + _HEAD > self._end:
            self._make_room(needed + _HEAD)
        self._head(_LETTER, content.numel(), tag)
        if content.numel():
            self._segment.tensor(torch.uint8, content.numel(), self._at + _HEAD).copy_(content)
        self._at += needed
        self._count += 1
        self._unread += 1
        semaphores.post(self._sent)
        semaphores.post(self._bell)

    def _make_room(self, needed: int) -> None:
        if self._unread == 0 and self._start + needed <= self._end:
            self._head(_AGAIN)
            self._at = self._start
            return
        segment = Segment.create(max(_NEXT, needed), reserve=True)
        self._head(_ELSEWHERE, segment.file)
        self._offered.append((self._count + 1, segment))
        self._segment, self._start, self._end, self._at = segment, 0, segment.nbytes, 0

    def _head(self, kind: int, one: int = 0, other: int = 0) -> None:
        head = self._segment.memory(24, self._at).cast("q")
        head[0], head[1], head[2] = kind, one, other

    def _close_files(self) -> None:
        # Of n letters taken one at least is the n-th or a later one, and who took that has mapped its memory.
        while self._offered and self._offered[0][0] <= self._count - self._unread:
            self._offered.pop(0)[1].close_file()

    def close(self, seconds: float, there: Callable[[], bool]) -> None:
        """Put nothing any more; returns when the receiver has mapped the memory of all letters, which outlives us then.

        Args:
            seconds: how long to wait for that.
            there: whether the receiver still lives.
        """
        deadline = time.monotonic() + seconds
        while self._offered and time.monotonic() < deadline:
            if semaphores.sleep_until_taken(self._taken, _NAP):
                self._unread -= 1
                self._close_files()
            elif not there():
                break
        for _, segment in self._offered:
            segment.close_file()
        self._offered = []


class Receiver:
    """The end of a stream that letters are taken out of.

    Args:
        source, process: which tower sends, and its process id.
        segment, start: where the first piece of memory lies.
        sent, taken: addresses of the semaphores.
    """

    def __init__(self, source: int, process: int, segment: Segment, start: int, sent: int, taken: int) -> None:
        self._source, self._process = source, process
        self._segment, self._start, self._at = segment, start, start
        self._sent, self._taken = sent, taken

    def letters(self) -> Iterator[Letter]:
        """Those that have come since the last call; never waits.

        Raises:
            PeerLostError: the sender ended before its letter was taken, and the letter with it.
        """
        while semaphores.take(self._sent):
            yield self._next()

    def _next(self) -> Letter:
        while True:
            kind, one, tag = self._segment.memory(24, self._at).cast("q")
            if kind == _LETTER:
                content = self._segment.tensor(torch.uint8, one, self._at + _HEAD)
                self._at += _HEAD + aligned(one)
                return Letter(self._source, tag, content)
            if kind == _ELSEWHERE:
                try:
                    self._segment, self._start = Segment.open(self._process, one), 0
                except OSError:
                    raise PeerLostError(
                        f"tower {self._source} (process {self._process}) ended before its message was received"
                    ) from None
            self._at = self._start

    def thank(self) -> None:
        """Tell the sender that a letter was taken."""
        semaphores.post(self._taken)
