"""Where the towers of one host meet: each returns when all have come, and none waits for one that is gone."""

from __future__ import annotations

from collections.abc import Sequence

from towers.collectives.shared_memory import semaphores
from towers.collectives.shared_memory.peers import Peers
from towers.errors import (
    DECIDE_TOGETHER,
    DisagreementError,
    ForkedError,
    PeerLostError,
    TowersError,
    in_words,
    out_of_step,
)
from towers.health.status import Health, Wait
from towers.health.timeout_messages import last_seen, timeout_error
from towers.system import machine
from towers.system.timeouts import Countdown

BOARD_BYTES = 512
"""Size of a tower's board, on which it writes what it has come for, and why it comes no more."""

_TEXT = 128  # two of them take turns: who writes one again has met everybody since, who so has read it
_FAREWELL = slice(2 * _TEXT, BOARD_BYTES)
_SPINS = 200
_NAP = 0.1  # seconds between two looks whether the others live
_LONGEST = 1.0  # seconds: who has not looked for longer was suspended, perhaps with all others


class Barrier:
    """One tower's way to the others.

    What a tower wrote into shared memory before a meeting the others see after it:
    :mod:`towers.collectives.shared_memory.semaphores` says why.

    A tower whose meeting ended in an exception is out of step with the others: it may have told them that it is there
    and not have seen them, or the other way round. It meets nobody any more, and the others are told.

    Args:
        index: this tower.
        inboxes: of every tower, the address of as many semaphores as there are towers, one for each that may come.
        boards: every tower's board, :data:`BOARD_BYTES` long.
        processes: every tower's process id.
        timeout: seconds to wait for the others.
        towers: what messages call the towers.
        health: where this tower is, and what it can see of the others.
        name: tells this meeting from others, equal on all towers.

    Attributes:
        count: how often this tower has come.
    """

    def __init__(
        self,
        index: int,
        inboxes: Sequence[int],
        boards: Sequence[memoryview],
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
        self._index = index
        self._timeout = timeout
        self._health = health
        self._processes = list(processes)
        self._boards = [[board[:_TEXT], board[_TEXT : 2 * _TEXT]] for board in boards]
        self._farewells = [board[_FAREWELL] for board in boards]
        self._broken: TowersError | None = None
        self._turn = 0
        self._outbox = [inboxes[tower] + semaphores.BYTES * index for tower in others]
        self._inbox = [(tower, inboxes[index] + semaphores.BYTES * tower) for tower in others]
        self._peers = Peers({tower: processes[tower] for tower in others})
        # With more towers than cores, whoever spins keeps from the core the one it waits for.
        self._spins = _SPINS if len(processes) <= machine.cores() else 0
        health.watch(self)

    def wait(self) -> None:
        """Return when all towers have called it.

        Raises:
            PeerLostError: a tower that had not come has ended, or comes no more.
            CollectiveTimeoutError: a tower did not come before the deadline.
            TowersError: as of :meth:`check_whole`.
        """
        self.check_whole()
        self.count += 1
        try:
            for address in self._outbox:
                semaphores.post(address)
            for tower, address in self._inbox:
                for _ in range(self._spins):
                    if semaphores.take(address):
                        break
                else:
                    self._await(tower, address)
        except BaseException as error:
            self.break_off(error)
            raise

    def check_whole(self) -> None:
        """See that this tower may go on; also before it writes where the others may still read.

        Raises:
            TowersError: it broke off what the towers were doing together.
        """
        if self._broken is not None:
            raise type(self._broken)(*self._broken.args)

    def break_off(self, error: BaseException) -> None:
        """This tower gives up what the towers were doing together, because of ``error``, and comes no more."""
        if self._broken is None:
            self._broken = out_of_step(self.towers[self._index], error)
            text = in_words(error).encode()[: BOARD_BYTES - 2 * _TEXT]
            self._farewells[self._index][: len(text)] = text

    def disown(self, error: ForkedError) -> None:
        """This process was forked from a tower and is none itself: it writes nothing where the others read."""
        self._broken = error

    def wait_tagged(self, purpose: str) -> None:
        """As :meth:`wait`, and see that all towers have come for the same.

        Args:
            purpose: what this tower is about to do, as a person would say it ("steps its optimizer").

        Raises:
            DisagreementError: on all towers, when they have not.
            PeerLostError, CollectiveTimeoutError: as of :meth:`wait`.
        """
        self.check_whole()
        self._turn ^= 1
        # The number of the meeting tells what was written for this one from what was written before.
        mine = f"{self.count + 1} {purpose}".encode()[:_TEXT].ljust(_TEXT, b"\0")
        self._boards[self._index][self._turn][:] = mine
        self.wait()
        said = [self._purpose(bytes(board[self._turn])) for board in self._boards]
        for tower, other in enumerate(said):
            if other != said[0]:
                first, second = (text or "does something else" for text in (said[0], other))
                error = DisagreementError(
                    f"the towers do different things: tower 0 {first}, tower {tower} {second}; every tower must make "
                    f"the same calls in the same order. {DECIDE_TOGETHER}"
                )
                if None in said:  # who has written nothing compares nothing, and would wait
                    self.break_off(error)
                raise error

    def _purpose(self, text: bytes) -> str | None:
        """What a tower has come for; None if it has not written that for this meeting."""
        number, _, purpose = text.rstrip(b"\0").decode(errors="replace").partition(" ")
        return purpose if number == str(self.count) else None

    def _await(self, tower: int, address: int) -> None:
        countdown = Countdown(self._timeout, _LONGEST)
        while not semaphores.sleep_until_taken(address, _NAP):
            self._health.waits = Wait(self.name, self.count, self.towers)
            lost = self.lost_peer() or self._broken_off()
            if lost is not None:
                if semaphores.take(address):  # it came before it went
                    break
                raise lost
            self._health.check_deadlock()
            if countdown.remaining() < 0:
                error = timeout_error(self._health, self.towers[self._index], self._timeout, self.towers[tower])
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
            f"{names} ended while tower {self.towers[self._index]} waited for it in a collective"
            f"{last_seen(self._health, towers)}"
        )

    def _broken_off(self) -> PeerLostError | None:
        """The error that says which tower comes no more, if one has said so."""
        for index, farewell in enumerate(self._farewells):
            if farewell[0] and index != self._index:
                why = bytes(farewell).rstrip(b"\0").decode(errors="replace")
                me, other = self.towers[self._index], self.towers[index]
                return PeerLostError(
                    f"tower {other} broke off a collective in which tower {me} waits for it, and joins no other ({why})"
                )
        return None

    def close(self) -> None:
        """Stop watching the others."""
        self._peers.close()
