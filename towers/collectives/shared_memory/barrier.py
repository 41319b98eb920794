"""A barrier for the processes of one host: each waits until all have arrived, and none waits for one that has ended.

[Note: a barrier that broke is the last]
A tower that leaves a barrier by an exception (Ctrl-C, a time-out) may have told the others that it is there without
having seen them, or the other way round. Were it to come again, the others would take an old arrival for a new one, and
read memory that is half written. So such a tower is out of step for good: it writes a failure notice into its status
slot, every later call raises the first error again, and the others raise :class:`PeerLostError` with that notice at
once instead of waiting for the deadline.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from towers.collectives.communicator import Caller
from towers.collectives.shared_memory import semaphores
from towers.collectives.shared_memory.peer_processes import PeerProcesses
from towers.errors import DECIDE_TOGETHER, DisagreementError, PeerLostError, in_words
from towers.health.peers import Wait
from towers.health.status import Health
from towers.health.timeout_messages import last_seen, timeout_error
from towers.system import machine
from towers.system.timeouts import Deadline

_TAG = 256  # bytes
_NOTICE = 256  # bytes

STATUS_BYTES = 2 * _TAG + _NOTICE
"""Size of a tower's status slot: its last two tags, which say what it has come for, and a failure notice."""

_SPINS = 200
_NAP = 0.1  # seconds between two checks that the others live
_LONGEST = 1.0  # seconds: a tower that has not checked for longer was suspended, perhaps with all others


class Tags:
    """Tells what every tower has come for, by numbered texts in shared memory, the last two of each tower.

    A tower writes its tag before it waits for the others, which can read it when they are through. Two suffice: no
    tower can be in the call after the next one, which needs all to have ended this one.

    Args:
        index: this tower.
        slots: every tower's status slot.
    """

    def __init__(self, index: int, slots: Sequence[memoryview]) -> None:
        self._index = index
        self._slots = [(slot[:_TAG], slot[_TAG : 2 * _TAG]) for slot in slots]
        self._number = 0

    def write(self, number: int, tag: str) -> None:
        """Say what this tower comes for next.

        Args:
            number: tells a tag for this time from an older one; more than one higher if all have met in between.
        """
        self._number = number
        text = f"{number} {tag}".encode()
        if len(text) > _TAG:
            text = text[: _TAG - 20] + b" #%08x" % zlib.crc32(text)
        self._slots[self._index][number % 2][:] = text.ljust(_TAG, b"\0")

    def differing(self) -> list[str | None]:
        """Every tower's tag, None where it has come for something without; empty where all have come for the same."""
        texts = [bytes(places[self._number % 2]) for places in self._slots]
        if texts.count(texts[0]) == len(texts):
            return []
        return [tag if number == self._number else None for number, tag in map(_parse, texts)]

    def last(self) -> list[tuple[int, str]]:
        """Every tower's last tag, and its number: 0 where there is none."""
        return [max(map(_parse, map(bytes, places))) for places in self._slots]


def _parse(text: bytes) -> tuple[int, str]:
    number, _, tag = text.rstrip(b"\0").decode(errors="replace").partition(" ")
    return int(number or 0), tag.rstrip()


class Barrier(Caller):
    """One tower's side of a barrier.

    What a tower wrote into shared memory before a barrier the others see after it:
    :mod:`towers.collectives.shared_memory.semaphores` says why. After an exception it is of no use any more: see
    [Note: a barrier that broke is the last].

    Args:
        index: this tower.
        inboxes: the address of every tower's semaphores, as many as there are towers, one for each that may come.
        slots: every tower's status slot, :data:`STATUS_BYTES` long.
        processes: every tower's process id.
        timeout: seconds to wait for the others.
        towers: what messages call the towers.
        health: the status of this tower, and its view of the others.
        name: tells this barrier from others, equal on all towers.

    Attributes:
        count: how often this tower has arrived.
        tags: what the towers come for, where they say it.
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
        self._seen = [0] * len(others)  # how many arrivals of each this tower has taken notice of
        self._peers = PeerProcesses({tower: processes[tower] for tower in others})
        # With more towers than cores, a tower that spins keeps the one it waits for off the core.
        self._spins = _SPINS if self.size <= machine.cores() else 0
        health.watch(self)

    def wait(self) -> None:
        """Return when all towers have called it.

        Raises:
            PeerLostError: a tower that had not arrived has ended, or has left a failure notice.
            CollectiveTimeoutError: a tower did not arrive before the deadline.
            TowersError: see :meth:`check_in_step`.
        """
        self.arrive()
        self.passed(self.count)

    def arrive(self) -> None:
        """Tell the others that this tower has come, the first half of :meth:`wait`; it may come ahead several times."""
        self.check_in_step()
        self.count += 1
        try:
            for address in self._outbox:
                semaphores.post(address)
        except BaseException as error:
            self.break_off(error)
            raise

    def passed(self, number: int, *, wait: bool = True) -> bool:
        """Whether all others have come for time ``number`` (of :attr:`count`): the second half of :meth:`wait`.

        Args:
            wait: for those that have not; it raises what :meth:`wait` raises.
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
        """Break off a collective because of ``error``: leave a failure notice, and come no more."""
        if self._broken is None:
            super().break_off(error)
            text = in_words(error).encode()[:_NOTICE]
            self._notices[self.index][: len(text)] = text

    def wait_tagged(self, tag: str) -> None:
        """:meth:`wait`, and check that all towers have come with the same tag.

        Args:
            tag: what this tower is about to do, as a person would say it ("steps its optimizer").

        Raises:
            DisagreementError: on all towers, when tags differ.
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
                if None in tags:  # that tower has called wait, so it compares nothing and would go on waiting
                    self.break_off(error)
                raise error

    def _await(self, tower: int, address: int, number: int) -> None:
        deadline = Deadline(self._timeout, _LONGEST)
        while not semaphores.sleep_until_taken(address, _NAP):
            self._health.waits = Wait(self.name, number, self.towers)
            lost = self.lost_peer() or self._broken_off()
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

    def lost_peer(self) -> PeerLostError | None:
        """The error that says which towers have ended, if any have."""
        gone = self._peers.gone()
        if not gone:
            return None
        towers = [self.towers[index] for index in gone]
        names = ", ".join(f"tower {self.towers[index]} (process {self._processes[index]})" for index in gone)
        return PeerLostError(
            f"{names} ended while tower {self.towers[self.index]} waited for it in a collective"
            f"{last_seen(self._health, towers)}"
        )

    def _broken_off(self) -> PeerLostError | None:
        """The error for a tower that has left a failure notice, if one has."""
        for index, notice in enumerate(self._notices):
            if notice[0] and index != self.index:
                why = bytes(notice).rstrip(b"\0").decode(errors="replace")
                me, other = self.towers[self.index], self.towers[index]
                return PeerLostError(
                    f"tower {other} broke off a collective in which tower {me} waits for it, and joins no other ({why})"
                )
        return None

    def close(self) -> None:
        """Stop watching the others."""
        self._peers.close()
