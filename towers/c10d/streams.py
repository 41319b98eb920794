"""Streams of messages from one tower to another, through memory of the sender that the receiver maps.

A stream is a chain of buffers with consecutive messages. If a buffer is full and all its messages were received, the
sender continues at its start. Otherwise, it continues in a new buffer, whose file number it writes into the old one. So
a send never blocks, and a receiver that never receives costs memory, not time.

Two semaphores count the messages that were sent and received. Only they order the accesses to memory
(:mod:`towers.collectives.shared_memory.semaphores`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from towers.collectives.shared_memory import semaphores
from towers.collectives.shared_memory.peer_processes import PeerProcesses
from towers.collectives.shared_memory.segment import ALIGNMENT, Segment, aligned
from towers.errors import PeerLostError
from towers.system.timeouts import Deadline

FIRST = 2**16
"""Bytes of a stream's first buffer."""

_NEXT = 2**20  # bytes of the next buffers, at least
_HEADER = ALIGNMENT  # bytes of a message's header: its kind and two more integers
_MESSAGE, _WRAP, _NEXT_BUFFER = 1, 2, 3
_POLL = 0.1  # seconds between two checks whether the receiver still runs


@dataclass
class Message:
    """A message in the memory of its sender, where it stays until it is acknowledged.

    Attributes:
        content: flat, uint8.
    """

    source: int
    tag: int
    content: Tensor


class Sender:
    """The sending end of a stream.

    Args:
        segment, start: location of the first buffer, :data:`FIRST` bytes long.
        sent, received: addresses of the semaphores.
        doorbell: address of a semaphore that the receiver sleeps on.
    """

    def __init__(self, segment: Segment, start: int, sent: int, received: int, doorbell: int) -> None:
        self._segment, self._start, self._end, self._at = segment, start, start + FIRST, start
        self._sent, self._received, self._doorbell = sent, received, doorbell
        self._unread = self._count = 0
        self._unmapped: list[tuple[int, Segment]] = []  # buffers, each with the number of its first message

    def send(self, content: Tensor, tag: int) -> None:
        """Sends a copy of ``content`` (flat, uint8). It never blocks.

        Raises:
            OSError: there is no memory for it.
        """
        while semaphores.take(self._received):
            self._unread -= 1
        self._close_mapped()
        needed = _HEADER + aligned(content.numel())
        if self._at + needed + _HEADER > self._end:
            self._make_room(needed + _HEADER)
        self._write_header(_MESSAGE, content.numel(), tag)
        if content.numel():
            self._segment.tensor(torch.uint8, content.numel(), self._at + _HEADER).copy_(content)
        self._at += needed
        self._count += 1
        self._unread += 1
        semaphores.post(self._sent)
        semaphores.post(self._doorbell)

    def _make_room(self, needed: int) -> None:
        if self._unread == 0 and self._start + needed <= self._end:
            self._write_header(_WRAP)
            self._at = self._start
            return
        segment = Segment.create(max(_NEXT, needed), reserve=True)
        self._write_header(_NEXT_BUFFER, segment.file)
        self._unmapped.append((self._count + 1, segment))
        self._segment, self._start, self._end, self._at = segment, 0, segment.nbytes, 0

    def _write_header(self, kind: int, value: int = 0, tag: int = 0) -> None:
        header = self._segment.memory(24, self._at).cast("q")
        header[0], header[1], header[2] = kind, value, tag

    def _close_mapped(self) -> None:
        # n received messages include the n-th or a later one, and receiving that one mapped its buffer.
        while self._unmapped and self._unmapped[0][0] <= self._count - self._unread:
            self._unmapped.pop(0)[1].close_file()

    def close(self, seconds: float, peers: PeerProcesses, receiver: int) -> None:
        """Stops sending, after the receiver has mapped all buffers, which then outlive this process.

        Args:
            seconds: the time to wait for that.
            peers: the processes of the towers, including ``receiver``.
        """
        deadline = Deadline(seconds)
        while self._unmapped and not deadline.has_passed():
            if semaphores.sleep_until_taken(self._received, _POLL):
                self._unread -= 1
                self._close_mapped()
            elif receiver in peers.gone():
                break
        for _, segment in self._unmapped:
            segment.close_file()
        self._unmapped = []


class Receiver:
    """The receiving end of a stream.

    Args:
        source, process: the sending tower, and its process id.
        segment, start: location of the first buffer.
        sent, received: addresses of the semaphores.
    """

    def __init__(self, source: int, process: int, segment: Segment, start: int, sent: int, received: int) -> None:
        self._source, self._process = source, process
        self._segment, self._start, self._at = segment, start, start
        self._sent, self._received = sent, received

    def messages(self) -> Iterator[Message]:
        """Yields the messages that have arrived since the last call. It never blocks.

        Raises:
            PeerLostError: the sender ended before its message was received, and the message is lost.
        """
        while semaphores.take(self._sent):
            yield self._next()

    def _next(self) -> Message:
        while True:
            kind, value, tag = self._segment.memory(24, self._at).cast("q")
            if kind == _MESSAGE:
                content = self._segment.tensor(torch.uint8, value, self._at + _HEADER)
                self._at += _HEADER + aligned(value)
                return Message(self._source, tag, content)
            if kind == _NEXT_BUFFER:
                try:
                    self._segment, self._start = Segment.open(self._process, value), 0
                except OSError:
                    raise PeerLostError(
                        f"tower {self._source} (process {self._process}) ended before its message was received"
                    ) from None
            self._at = self._start

    def acknowledge(self) -> None:
        """Reports to the sender that a message was received."""
        semaphores.post(self._received)
