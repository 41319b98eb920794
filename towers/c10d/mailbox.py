"""Mail: messages from one tower of a host to another, which nobody has to wait for with a send.

A sender finds room at any time (:mod:`towers.c10d.streams`), so towers that send to each other at once cannot
deadlock, in whatever order they then receive. Letters are read by whoever waits for one.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from functools import partial

import torch
from torch import Tensor

from towers.c10d.streams import FIRST, Letter, Receiver, Sender
from towers.collectives.communicator import Communicator
from towers.collectives.shared_memory import semaphores
from towers.collectives.shared_memory.peers import Peers
from towers.collectives.shared_memory.segment import Segment, aligned
from towers.collectives.shared_memory.sharing import share
from towers.errors import CollectiveTimeoutError, DisagreementError, PeerLostError

_NAP = 0.1  # seconds between two looks whether the others live
_FAREWELL = 10.0  # seconds that a program which ends leaves its receivers to take what it sent


class _Layout:
    """Where things lie in a tower's segment, in bytes."""

    def __init__(self, towers: int) -> None:
        self.sent = 0  # a semaphore for each sender
        self.taken = semaphores.BYTES * towers  # a semaphore for each receiver
        self.bell = 2 * semaphores.BYTES * towers
        self.streams = aligned(self.bell + semaphores.BYTES)  # one to each receiver
        self.total = self.streams + FIRST * towers


class Expected:
    """A message that a tower waits for.

    Attributes:
        into: where its content goes, flat, bytes.
        source: who sends it, None for anybody; when it is there, who did.
        done: whether it is there.
    """

    def __init__(self, mail: Mail, into: Tensor, source: int | None, tag: int) -> None:
        self._mail, self.into, self.source, self.tag = mail, into, source, tag
        self.done = False
        self.error: Exception | None = None

    def accepts(self, letter: Letter) -> bool:
        """Whether this is the message."""
        return self.tag == letter.tag and self.source in (None, letter.source)

    def look(self) -> bool:
        """Whether it is there by now; never waits."""
        self._mail.look()
        return self.done

    def wait(self, seconds: float | None = None) -> None:
        """Return when it is there.

        Raises:
            PeerLostError: its sender has ended.
            CollectiveTimeoutError: it did not come in time.
            DisagreementError: it is of another length than ``into``.
        """
        self._mail.wait_for(self, seconds)

    def __str__(self) -> str:
        source = "any tower" if self.source is None else f"tower {self.source}"
        return f"a message from {source} with tag {self.tag}"


class Mail:
    """One tower's letters from and to the others of its host; forming it is a collective.

    Args:
        comm: of the same towers.
        seconds: how long to wait for a letter.

    Raises:
        OSError: on all towers, when one could not make or map its memory.
    """

    def __init__(self, comm: Communicator, seconds: float) -> None:
        self._index, self._seconds = comm.index, seconds
        layout = _Layout(comm.size)
        segments, self._processes = share(comm, layout.total, 2 * comm.size + 1)
        mine, one = segments[comm.index], semaphores.BYTES
        pairs = [tower for tower in range(comm.size) if tower != comm.index]
        self._peers = Peers({tower: self._processes[tower] for tower in pairs})
        self._senders = {
            to: Sender(
                mine,
                layout.streams + FIRST * to,
                segments[to].address + layout.sent + one * comm.index,
                mine.address + layout.taken + one * to,
                segments[to].address + layout.bell,
            )
            for to in pairs
        }
        self._receivers = {
            source: Receiver(
                source,
                self._processes[source],
                segments[source],
                layout.streams + FIRST * comm.index,
                mine.address + layout.sent + one * source,
                segments[source].address + layout.taken + one * comm.index,
            )
            for source in pairs
        }
        self._bell = mine.address + layout.bell
        self._segments = segments  # the addresses are theirs
        self._letters: list[Letter] = []
        self._expected: list[Expected] = []
        self._waiting = 0
        self._lock = threading.Lock()
        self._leave = weakref.finalize(self, _see_off_at_exit, os.getpid(), self._senders, self._peers, segments)

    def send(self, content: Tensor, to: int, tag: int = 0) -> None:
        """Send a copy of ``content`` (flat, bytes) to tower ``to``; never waits.

        Raises:
            OSError: there is no memory for it.
        """
        with self._lock:
            self._senders[to].put(content, tag)

    def expect(self, into: Tensor, source: int | None, tag: int = 0) -> Expected:
        """Have the next letter from ``source`` (None: from anybody) with this tag copied to ``into`` (flat, bytes)."""
        expected = Expected(self, into, source, tag)
        with self._lock:
            self._read()
            letter = next(filter(expected.accepts, self._letters), None)
            if letter is None:
                self._expected.append(expected)
            else:
                self._letters = [other for other in self._letters if other is not letter]
                self._deliver(letter, expected)
        return expected

    def look(self) -> None:
        """Deliver what is there."""
        with self._lock:
            self._read()

    def wait_for(self, expected: Expected, seconds: float | None = None) -> None:
        """See :meth:`Expected.wait`."""
        seconds = self._seconds if seconds is None else seconds
        deadline = time.monotonic() + seconds
        self._waiting += 1
        try:
            while not expected.look():
                if semaphores.sleep_until_taken(self._bell, _NAP):
                    continue
                gone = self._peers.gone()
                if expected.look():  # it was sent before its sender went
                    break
                if gone and (expected.source in gone or (expected.source is None and len(gone) == len(self._senders))):
                    raise self._lost(expected, gone)
                if time.monotonic() > deadline:
                    raise CollectiveTimeoutError(f"waited {seconds:.0f} s for {expected}")
        except BaseException:
            with self._lock, contextlib.suppress(ValueError):
                self._expected.remove(expected)
            raise
        finally:
            self._waiting -= 1
            if self._waiting:
                semaphores.post(self._bell)  # this thread may have heard it for another
        if expected.error is not None:
            raise expected.error

    def _lost(self, expected: Expected, gone: list[int]) -> PeerLostError:
        names = ", ".join(f"tower {tower} (process {self._processes[tower]})" for tower in gone)
        return PeerLostError(f"{names} ended while tower {self._index} waited for {expected}")

    def _read(self) -> None:
        for receiver in self._receivers.values():
            for letter in receiver.letters():
                expected = next((one for one in self._expected if one.accepts(letter)), None)
                if expected is None:
                    self._letters.append(letter)
                else:
                    self._expected.remove(expected)
                    self._deliver(letter, expected)

    def _deliver(self, letter: Letter, expected: Expected) -> None:
        expected.source = letter.source
        given, room = letter.content.numel(), expected.into.numel()
        if given == room:
            with torch.inference_mode():  # in which any tensor may be written
                expected.into.copy_(letter.content)
        else:
            expected.error = DisagreementError(
                f"{expected} has {given} bytes, but the tensor it is to be received into has {room}"
            )
        expected.done = True
        self._receivers[letter.source].thank()

    def close(self, seconds: float | None = None) -> None:
        """Neither send nor receive any more; large letters that are under way are waited for.

        Args:
            seconds: for so long; as long as for anything without it.
        """
        if self._leave.detach():
            _see_off(self._senders, self._peers, self._segments, self._seconds if seconds is None else seconds)


def _see_off_at_exit(process: int, senders: dict[int, Sender], peers: Peers, segments: list[Segment]) -> None:
    if os.getpid() == process:  # not a fork of it
        _see_off(senders, peers, segments, _FAREWELL)


def _see_off(senders: dict[int, Sender], peers: Peers, segments: list[Segment], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for to, sender in senders.items():
        sender.close(deadline - time.monotonic(), partial(_there, peers, to))
    peers.close()


def _there(peers: Peers, tower: int) -> bool:
    return tower not in peers.gone()
