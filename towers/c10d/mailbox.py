"""Point-to-point messages between towers of one host. Sends never block.

A sender always has memory for a message, so towers that send to each other at the same
time cannot deadlock, in whichever order they then receive. Any thread that waits for a message reads messages from the
streams.

A stream is a chain of buffers with consecutive messages. If a buffer is full and all its messages were received, the
sender continues at its start. Otherwise, it continues in a new buffer, whose file number it writes into the old one. So
a send never blocks, and a receiver that never receives costs memory, not time.

Two semaphores count the messages that were sent and received. Only they order the accesses to memory
(:mod:`towers.collectives.shared_memory.semaphores`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from towers.c10d.works import CompletedWork
from towers.collectives.communicator import Communicator
from towers.collectives.shared_memory import semaphores
from towers.collectives.shared_memory.barrier import PeerProcesses
from towers.collectives.shared_memory.segment import ALIGNMENT, Segment, aligned, map_segments
from towers.errors import CollectiveTimeoutError, DisagreementError, PeerLostError, TowersError
from towers.system.timeouts import Deadline

_EXIT_SECONDS = 30.0  # a program's wait for its receivers, at its end

FIRST = 2**16
"""Bytes of a stream's first buffer."""

_NEXT = 2**20  # bytes of the next buffers, at least
_HEADER = ALIGNMENT  # bytes of a message's header: its kind and two more integers
_MESSAGE, _WRAP, _NEXT_BUFFER = 1, 2, 3
_POLL = 0.1  # seconds between two checks whether the other end still runs


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


class _SegmentLayout:
    """Offsets in a tower's segment, in bytes."""

    def __init__(self, towers: int) -> None:
        self.sent = 0  # a semaphore for each sender
        self.received = semaphores.BYTES * towers  # a semaphore for each receiver
        self.doorbell = 2 * semaphores.BYTES * towers
        self.streams = aligned(self.doorbell + semaphores.BYTES)  # one to each receiver
        self.total = self.streams + FIRST * towers


class ReceiveWork(CompletedWork):
    """A message that a tower waits for.

    Attributes:
        into: receives its content.
        source: the sender, None for any. On arrival, it is set to the actual one.
        done: whether it has arrived, or never will, which an error explains.
    """

    def __init__(self, mailbox: Mailbox, into: Tensor, source: int | None, tag: int) -> None:
        super().__init__([into])
        self._mailbox, self.into, self.source, self.tag = mailbox, into, source, tag
        self.done = False
        self.error: BaseException | None = None

    def accepts(self, message: Message) -> bool:
        """Returns whether sender and tag are the expected ones."""
        return self.tag == message.tag and self.source in (None, message.source)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Waits until it has arrived.

        Raises:
            PeerLostError: its sender has ended.
            CollectiveTimeoutError: it did not arrive in time.
            DisagreementError: it has another length than ``into``.
        """
        self._mailbox.wait_for(self, timeout.total_seconds())
        return True

    def is_completed(self) -> bool:
        if not self.done:
            self._mailbox.poll()
        return self.done

    def exception(self) -> Any:
        return self.error

    def source_rank(self) -> int:
        assert self.source is not None
        return self.source

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()

        def wait() -> None:
            try:
                self.wait()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(self.result())

        threading.Thread(target=wait, name="towers-receive", daemon=True).start()
        return future

    def __str__(self) -> str:
        source = "any tower" if self.source is None else f"tower {self.source}"
        return f"a message from {source} with tag {self.tag}"


class Mailbox:
    """One tower's messages to and from the others of its host. Creating it is a collective.

    Args:
        comm: a communicator of the same towers.
        seconds: the time to wait for a message.

    Raises:
        OSError: on all towers, if one could not allocate or map its memory.
    """

    def __init__(self, comm: Communicator, seconds: float) -> None:
        self._index, self._seconds = comm.index, seconds
        layout = _SegmentLayout(comm.size)
        segments, self._processes = map_segments(comm, layout.total, 2 * comm.size + 1)
        own, step = segments[comm.index], semaphores.BYTES
        others = [tower for tower in range(comm.size) if tower != comm.index]
        self._peers = PeerProcesses({tower: self._processes[tower] for tower in others})
        self._senders = {
            to: Sender(
                own,
                layout.streams + FIRST * to,
                segments[to].address + layout.sent + step * comm.index,
                own.address + layout.received + step * to,
                segments[to].address + layout.doorbell,
            )
            for to in others
        }
        self._receivers = {
            source: Receiver(
                source,
                self._processes[source],
                segments[source],
                layout.streams + FIRST * comm.index,
                own.address + layout.sent + step * source,
                segments[source].address + layout.received + step * comm.index,
            )
            for source in others
        }
        self._doorbell = own.address + layout.doorbell
        self._segments = segments  # keeps the memory at these addresses mapped
        self._unexpected: list[Message] = []
        self._pending: list[ReceiveWork] = []
        self._waiting = 0
        self._lock = threading.Lock()
        self._exit = weakref.finalize(self, _drain_at_exit, os.getpid(), self._senders, self._peers, segments)

    def send(self, content: Tensor, to: int, tag: int = 0) -> None:
        """Sends a copy of ``content`` (flat, uint8) to tower ``to``. It never blocks.

        Raises:
            OSError: there is no memory for it.
        """
        with self._lock:
            self._senders[to].send(content, tag)

    def receive(self, into: Tensor, source: int | None, tag: int = 0) -> ReceiveWork:
        """Copies the next message from ``source`` (None: any) with this tag to ``into`` when it arrives."""
        receive = ReceiveWork(self, into, source, tag)
        with self._lock:
            self._read()
            message = next(filter(receive.accepts, self._unexpected), None)
            if message is None:
                self._pending.append(receive)
            else:
                self._unexpected = [other for other in self._unexpected if other is not message]
                self._deliver(message, receive)
        return receive

    def poll(self) -> None:
        """Delivers messages that have arrived. It never blocks."""
        with self._lock:
            self._read()

    def wait_for(self, receive: ReceiveWork, seconds: float) -> None:
        """Performs :meth:`ReceiveWork.wait`. 0 seconds select the mailbox's time for a message."""
        seconds = seconds if seconds > 0 else self._seconds
        deadline = Deadline(seconds)
        self._waiting += 1
        try:
            while not receive.is_completed():
                if semaphores.sleep_until_taken(self._doorbell, _POLL):
                    continue
                gone = self._peers.gone()
                if receive.is_completed():  # the message was sent before its sender ended
                    break
                if gone and (receive.source in gone or (receive.source is None and len(gone) == len(self._senders))):
                    raise self._lost(receive, gone)
                if deadline.has_passed():
                    raise CollectiveTimeoutError(f"waited {seconds:.0f} s for {receive}")
        except BaseException as error:
            with self._lock:
                delivered = receive.done  # by another thread, in this moment
                if not delivered:
                    with contextlib.suppress(ValueError):
                        self._pending.remove(receive)
                    receive.done, receive.error = True, error
            if not delivered or not isinstance(error, TowersError):
                raise
        finally:
            self._waiting -= 1
            if self._waiting:
                semaphores.post(self._doorbell)  # this thread may have taken the post that was for another
        if receive.error is not None:
            raise receive.error

    def _lost(self, receive: ReceiveWork, gone: list[int]) -> PeerLostError:
        names = ", ".join(f"tower {tower} (process {self._processes[tower]})" for tower in gone)
        return PeerLostError(f"{names} ended while tower {self._index} waited for {receive}")

    def _read(self) -> None:
        for receiver in self._receivers.values():
            for message in receiver.messages():
                receive = next((pending for pending in self._pending if pending.accepts(message)), None)
                if receive is None:
                    self._unexpected.append(message)
                else:
                    self._pending.remove(receive)
                    self._deliver(message, receive)

    def _deliver(self, message: Message, receive: ReceiveWork) -> None:
        receive.source = message.source
        into = receive.into.detach()
        sent, room = message.content.numel(), into.nbytes
        if sent == room:
            with torch.inference_mode():  # inside, any tensor may be written
                into.copy_(message.content.view(into.dtype).view(into.shape))
        else:
            receive.error = DisagreementError(
                f"{receive} has {sent} bytes, but the tensor it is to be received into has {room}"
            )
        receive.done = True
        self._receivers[message.source].acknowledge()

    def close(self, seconds: float | None = None) -> None:
        """Stops sending and receiving, after the receivers have mapped all large messages.

        Args:
            seconds: the time to wait for them. Default: that for a message.
        """
        if self._exit.detach():
            _drain(self._senders, self._peers, self._segments, self._seconds if seconds is None else seconds)


def _drain_at_exit(process: int, senders: dict[int, Sender], peers: PeerProcesses, segments: list[Segment]) -> None:
    if os.getpid() == process:  # not a fork of it
        _drain(senders, peers, segments, _EXIT_SECONDS)


def _drain(senders: dict[int, Sender], peers: PeerProcesses, segments: list[Segment], seconds: float) -> None:
    """Closes the senders. ``segments`` is an argument so that their memory stays mapped until then."""
    deadline = Deadline(seconds)
    for to, sender in senders.items():
        sender.close(deadline.remaining(), peers, to)
    peers.close()
