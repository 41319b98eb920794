"""A barrier for the processes of one host: each waits until all have arrived, and none waits for one that has ended.

[Note: a barrier that broke is the last]
A tower that leaves a barrier with an exception (Ctrl-C, a time-out) may have signalled its arrival without having seen
the others' arrivals, or the other way round. If it arrived again, the others would take an old arrival for a new one,
and read memory that is half written. So such a tower is out of step for good. It writes a failure notice into its
status slot, and every later call raises the first error again. The others raise :class:`PeerLostError` with that notice
at once, instead of waiting for the deadline.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import weakref
import zlib
from collections.abc import Mapping, Sequence

from towers.collectives.communicator import Caller
from towers.collectives.shared_memory import semaphores
from towers.errors import DECIDE_TOGETHER, DisagreementError, PeerLostError, in_words
from towers.health.status import Health, Wait
from towers.health.timeout_messages import last_seen, timeout_error
from towers.system import machine
from towers.system.timeouts import Deadline

_TAG = 256  # bytes
_NOTICE = 256  # bytes
STATUS_BYTES = 2 * _TAG + _NOTICE
"""Size of a tower's status slot: its last two tags, which describe its calls, and a failure notice."""

_SPINS = 200
_NAP = 0.1  # seconds between two checks that the others still run
_LONGEST = 1.0  # seconds: a tower that has not checked for longer was suspended, perhaps with all others


class PeerProcesses:
    """Watches processes. If the system has pidfds, it uses these, because a process id may be given to another process.

    Args:
        processes: process id of every other tower, by its index.
    """

    def __init__(self, processes: Mapping[int, int]) -> None:
        self._processes = dict(processes)
        self._poll = select.poll()
        self._watched: dict[int, int] = {}
        for tower, process in processes.items():
            with contextlib.suppress(OSError, AttributeError):  # an old kernel, or a container that forbids it
                descriptor = os.pidfd_open(process)
                self._watched[descriptor] = tower
                self._poll.register(descriptor, select.POLLIN)
        self._close = weakref.finalize(self, _close, list(self._watched))

    def gone(self) -> list[int]:
        """Returns the towers whose processes have ended."""
        ended = {self._watched[descriptor] for descriptor, _ in self._poll.poll(0)}
        unwatched = set(self._processes) - set(self._watched.values())
        return sorted(ended | {tower for tower in unwatched if not os.path.exists(f"/proc/{self._processes[tower]}")})

    def wake(self, tower: int) -> None:
        """Continues a stopped tower (SIGCONT), because a stopped tower would not detect the end of the others."""
        for descriptor, watched in self._watched.items():
            if watched == tower:
                with contextlib.suppress(OSError):
                    signal.pidfd_send_signal(descriptor, signal.SIGCONT)

    def close(self) -> None:
        """Stops watching."""
        self._close()
        self._watched = {}
        self._poll = select.poll()


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class Tags:
    """Shows every tower's current call, with numbered texts in shared memory, the last two of each tower.

    A tower writes its tag before it waits for the others, which can read it after the barrier. Two tags suffice: no
    tower can be in the call after the next one, because that needs all towers to have ended this one.

    Args:
        index: this tower.
        slots: every tower's status slot.
    """

    def __init__(self, index: int, slots: Sequence[memoryview]) -> None:
        self._index = index
        self._slots = [(slot[:_TAG], slot[_TAG : 2 * _TAG]) for slot in slots]
        self._number = 0

    def write(self, number: int, tag: str) -> None:
        """Writes the description of this tower's next call.

        Args:
            number: distinguishes a tag for this call from an older one. It is more than one higher if all have met in
                between.
            tag: the description.
        """
        self._number = number
        text = f"{number} {tag}".encode()
        if len(text) > _TAG:
            text = text[: _TAG - 20] + b" #%08x" % zlib.crc32(text)
        self._slots[self._index][number % 2][:] = text.ljust(_TAG, b"\0")

    def differing(self) -> list[str | None]:
        """Returns every tower's tag, None for a call without tag; or an empty list if all towers make the same call."""
        texts = [bytes(places[self._number % 2]) for places in self._slots]
        if texts.count(texts[0]) == len(texts):
            return []
        return [tag if number == self._number else None for number, tag in map(_parse, texts)]

    def last(self) -> list[tuple[int, str]]:
        """Returns every tower's last tag with its number, which is 0 if there is none."""
        return [max(map(_parse, map(bytes, places))) for places in self._slots]


def _parse(text: bytes) -> tuple[int, str]:
    number, _, tag = text.rstrip(b"\0").decode(errors="replace").partition(" ")
    return int(number or 0), tag.rstrip()


class Barrier(Caller):
    """One tower's side of a barrier.

    The others see after a barrier all data that a tower wrote into shared memory before it:
    :mod:`towers.collectives.shared_memory.semaphores` contains the reason. After an exception, a barrier cannot be used
    any more: see [Note: a barrier that broke is the last].

    Args:
        index: this tower.
        inboxes: the address of every tower's semaphores: one semaphore for each tower.
        slots: every tower's status slot, :data:`STATUS_BYTES` long.
        processes: every tower's process id.
        timeout: seconds to wait for the others.
        towers: the towers' numbers in messages.
        health: the status of this tower, and its view of the others.
        name: distinguishes this barrier from others; equal on all towers.

    Attributes:
        count: how often this tower has arrived.
        tags: the descriptions of the towers' calls, if the calls have any.
    """

    def __init__(
        self,
        index: int,
        inboxes: Sequence[int],
        slots: Sequence[memoryview],
        processes: Sequence[int],
        timeout: float,
        towers: Sequence[int],
        health: Health,
        name: str,
    ) -> None:
        others = [tower for tower in range(len(processes)) if tower != index]
        self.name = name
        self.towers = towers
        self.count = 0
        self.index, self.size = index, len(processes)
        self._timeout = timeout
        self._health = health
        self._processes = list(processes)
        self.tags = Tags(index, slots)
        self._notices = [slot[2 * _TAG :] for slot in slots]
        self._outbox = [inboxes[tower] + semaphores.BYTES * index for tower in others]
        self._inbox = [(tower, inboxes[index] + semaphores.BYTES * tower) for tower in others]
        self._seen = [0] * len(others)  # the number of each other tower's arrivals that this tower has seen
        self._peers = PeerProcesses({tower: processes[tower] for tower in others})
        # With more towers than cores, a tower that spins takes the core from the tower that it waits for.
        self._spins = _SPINS if self.size <= machine.cores() else 0
        health.watch(self)

    def wait(self) -> None:
        """Waits until all towers have called it.

        Raises:
            PeerLostError: a tower that had not arrived has ended, or has left a failure notice.
            CollectiveTimeoutError: a tower did not arrive before the deadline.
            TowersError: see :meth:`check_in_step`.
        """
        self.arrive()
        self.passed(self.count)

    def arrive(self) -> None:
        """Signals this tower's arrival: the first half of :meth:`wait`. A tower may arrive several times ahead."""
        self.check_in_step()
        self.count += 1
        try:
            for address in self._outbox:
                semaphores.post(address)
        except BaseException as error:
            self.break_off(error)
            raise

    def passed(self, number: int, *, wait: bool = True) -> bool:
        """Returns whether all others have arrived ``number`` times: the second half of :meth:`wait`.

        Args:
            wait: whether to wait for the others. It then raises the errors of :meth:`wait`.
        """
        try:
            for place, (tower, address) in enumerate(self._inbox):
                while self._seen[place] < number:
                    for _ in range(self._spins if wait else 1):
                        if semaphores.take(address):
                            break
                    else:
                        if not wait:
                            return False
                        self._await(tower, address, number)
                    self._seen[place] += 1
        except BaseException as error:
            self.break_off(error)
            raise
        return True

    def break_off(self, error: BaseException) -> None:
        """Breaks off a collective because of ``error``: leaves a failure notice, and arrives no more."""
        if self._broken is None:
            super().break_off(error)
            text = in_words(error).encode()[:_NOTICE]
            self._notices[self.index][: len(text)] = text

    def wait_tagged(self, tag: str) -> None:
        """Waits like :meth:`wait`, and checks that all towers have the same tag.

        Args:
            tag: a description of this tower's call for users ("steps its optimizer").

        Raises:
            DisagreementError: on all towers, if tags differ.
            PeerLostError, CollectiveTimeoutError: see :meth:`wait`.
        """
        self.check_in_step()
        self.tags.write(self.count + 1, tag)
        self.wait()
        tags = self.tags.differing()
        for tower, other in enumerate(tags):
            if other != tags[0]:
                first, second = (text or "makes another call" for text in (tags[0], other))
                error = DisagreementError(
                    f"the towers made different calls: tower 0 {first}, tower {tower} {second}; every tower must make "
                    f"the same calls in the same order. {DECIDE_TOGETHER}"
                )
                if None in tags:  # that tower has called wait, so it compares no tags and would continue to wait
                    self.break_off(error)
                raise error

    def _await(self, tower: int, address: int, number: int) -> None:
        deadline = Deadline(self._timeout, _LONGEST)
        while not semaphores.sleep_until_taken(address, _NAP):
            self._health.waits = Wait(self.name, number, self.towers)
            lost = self.lost_peer(tower, number) or self._broken_off()
            if lost is not None:
                if semaphores.take(address):  # it arrived before it ended
                    break
                raise lost
            self._health.check_deadlock()
            if deadline.has_passed():
                error = timeout_error(self._health, self.towers[self.index], self._timeout, self.towers[tower])
                self.break_off(error)
                self._peers.wake(tower)
                raise error
        self._health.waits = None

    def lost_peer(self, awaited: int | None = None, number: int = 0) -> PeerLostError | None:
        """Returns the error that names the towers which have ended, or None.

        Args:
            awaited: the tower whose arrival this tower waits for.
            number: the number of that arrival. Another tower that has arrived as often may have ended.
        """
        gone = [tower for tower in self._peers.gone() if tower == awaited or not self._has_arrived(tower, number)]
        if not gone:
            return None
        towers = [self.towers[index] for index in gone]
        names = ", ".join(f"tower {self.towers[index]} (process {self._processes[index]})" for index in gone)
        return PeerLostError(
            f"{names} ended while tower {self.towers[self.index]} waited for it in a collective"
            f"{last_seen(self._health, towers)}"
        )

    def _has_arrived(self, tower: int, number: int) -> bool:
        """Returns whether a tower that is not awaited has arrived this number of times. 0: never."""
        [(place, address)] = [(i, address) for i, (other, address) in enumerate(self._inbox) if other == tower]
        while self._seen[place] < number and semaphores.take(address):
            self._seen[place] += 1
        return 0 < number <= self._seen[place]

    def _broken_off(self) -> PeerLostError | None:
        """Returns the error for a tower that has left a failure notice, or None."""
        for index, notice in enumerate(self._notices):
            if notice[0] and index != self.index:
                why = bytes(notice).rstrip(b"\0").decode(errors="replace")
                me, other = self.towers[self.index], self.towers[index]
                return PeerLostError(
                    f"tower {other} broke off a collective in which tower {me} waits for it, and joins no other ({why})"
                )
        return None

    def close(self) -> None:
        """Stops watching the others."""
        self._peers.close()
