"""Heartbeats between towers, through the store where they met.

About once a second every tower lays down where it is. A tower that waits for another in vain reads that, and asks it
for its stack. A thread does it, over a connection of its own; when the store is gone it is silent.

The chief's thread looks for deadlocks (:mod:`towers.health.deadlock`) as long as some tower says that it waits and
waits, and lays down what it finds for all. So the other towers make more requests only while they wait.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TypeVar

from torch.distributed import PrefixStore, Store, TCPStore

from towers.health import deadlock
from towers.health.deadlock import Standing, Wait
from towers.health.status import Health
from towers.health.status_record import Place, Record
from towers.joining import messages
from towers.joining.messages import Card, NotACardError
from towers.system.run_with_timeout import within
from towers.topology import Topology

INTERVAL = 1.0
"""Seconds between two heartbeats."""

_FAST = 0.25  # seconds between two heartbeats while some tower waits and waits
_BLOCKED, _DEADLOCK = "blocked", "deadlock"

_ANSWER = 1.6  # seconds in which a tower that lives answers, which it does when it gives its next sign
_SILENT = 2.5  # seconds without a sign after which a tower that does not answer counts as gone
_WATCHED = 1.3  # the same where heartbeats come through the store, which are watched while an answer is awaited
_PATIENCE = 0.5  # seconds for the store beyond that
_SERVING = 5.0  # seconds that a process which serves the store stays for others that end, too
_FRAMES = 12  # of a stack, the innermost

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Sight:
    """What one tower can see of another.

    Attributes:
        tower: the other.
        host: where it runs, if that is another host.
        place: where it is, or was last seen; None when it was never seen.
        seconds: for how long it has been there.
        silent: seconds since its last heartbeat; where that came through the store, as far as this tower has watched,
            for the clocks of hosts differ.
        stack: what its main thread does, if it could say.
        patience: so many silent seconds mean that it is gone.
    """

    tower: int
    host: str = ""
    place: Place | None = None
    seconds: float = 0.0
    silent: float = 0.0
    stack: str = ""
    patience: float = _WATCHED

    @property
    def lives(self) -> bool:
        """Whether it has answered, or gave a sign of life a moment ago."""
        return bool(self.stack) or (self.place is not None and self.silent < self.patience)

    def __str__(self) -> str:
        name = f"tower {self.tower}{self.host and f' on {self.host}'}"
        if self.place is None:
            return f"nothing is known of {name}"
        if self.lives:
            return f"{name} is {self.place}, for {self.seconds:.0f} s"
        return (
            f"{name} gives no sign of life for {self.silent:.0f} s (stopped, or its host is gone); it was last seen "
            f"{self.place}"
        )


class Heartbeat:
    """This tower's signs of life, and its view of the others'.

    Args:
        health: of this tower; the heartbeat ends with it.
        record: its record.
        topology: this tower's place; its ``address`` is the store's.
    """

    def __init__(self, health: Health, record: Record, topology: Topology) -> None:
        self._health = weakref.ref(health)
        self._record = record
        self._topology = topology
        self._stopping = False
        self._wake = threading.Event()
        self._call: Callable[[Store], object] | None = None  # what the thread is asked to do
        self._called = threading.Event()
        self._store: Store | None = None
        self._beat = 0
        self._waited: Wait | None = None  # at the last heartbeat
        self._blocked = 0  # how often towers have said that they wait and wait
        self._standings: dict[int, Standing] = {}
        self._observed: dict[int, tuple[int, float]] = {}  # of each tower: its newest heartbeat, and since when
        self._host = socket.gethostname()
        self._thread = threading.Thread(target=self._run, name="towers-heartbeat", daemon=True)
        atexit.register(self._stop)
        self._thread.start()

    def _stop(self) -> None:
        """A thread inside the store would be in the way of an interpreter that is taken down."""
        self._stopping = True
        self._wake.set()
        self._thread.join(_PATIENCE)

    # -- giving ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            store, self._store = self._connect()
            answered = 0
            while (health := self._health()) is not None:
                self._lay_down(store, f"sign{self._topology.index}", self._sign(health))
                asked = store.add(f"questions{self._topology.index}", 0)
                if asked > answered:
                    answer = {"question": asked, "stack": main_stack()}
                    self._lay_down(store, f"answer{self._topology.index}", answer)
                    answered = asked
                hurries = self._look_for_deadlock(store, health)
                del health
                self._wake.wait(_FAST if hurries else INTERVAL)
                self._wake.clear()
                if (call := self._call) is not None:
                    self._call = None
                    call(store)
                    self._called.set()
                if self._stopping:
                    return
        except (RuntimeError, OSError):  # the store has ended, with its host or in the normal way: nobody asks any more
            pass
        finally:
            atexit.unregister(self._stop)

    def _connect(self) -> tuple[Store, Store]:
        """The store, twice, for two threads."""
        assert self._topology.address is not None
        host, port = self._topology.address
        tcp = TCPStore(host, port, None, False, timedelta(seconds=30), wait_for_workers=False)
        prefix = f"towers/attempt{self._topology.attempt}/health"
        # A script may make several strategies, all towers in the same order.
        number = PrefixStore(prefix, tcp).add(f"strategies{self._topology.index}", 1)
        one, other = (PrefixStore(f"{prefix}/{number}", store) for store in (tcp, tcp.clone()))  # type: ignore[attr-defined]
        return one, other

    def _lay_down(self, store: Store, place: str, card: Card) -> None:
        store.set(place, messages.seal(self._topology.token, place, card))

    def _read(self, store: Store, place: str) -> Card | None:
        """What another tower has laid down there; None where nothing lies, or what a stranger has put there."""
        try:
            return messages.unseal(self._topology.token, place, store.get(place)) if store.check([place]) else None
        except NotACardError:
            return None

    def _sign(self, health: Health) -> Card:
        place = self._record.read()
        now = dataclasses.replace(place, since=time.monotonic() - place.since if place.since else 0.0)
        self._beat += 1
        standing = Standing(self._beat, now, health.begun(), health.waits)
        return {**standing.as_json(), "host": self._host}

    def _look_for_deadlock(self, store: Store, health: Health) -> bool:
        """Say so if this tower waits and waits, and hear whether that has an end; whether heartbeats are to be fast."""
        waits, waited = health.waits, self._waited
        self._waited = waits
        if waits is not None and waits == waited:
            store.add(_BLOCKED, 1)
            found = self._read(store, _DEADLOCK)
            health.deadlock = found["towers"] if found is not None else None
        return self._find_deadlock(store) if self._topology.is_chief else waits is not None

    def _find_deadlock(self, store: Store) -> bool:
        """The chief's part; whether some tower waits and waits."""
        before, self._blocked = self._blocked, store.add(_BLOCKED, 0)
        if self._blocked == before:
            self._standings = {}
            return False
        standings = self._standings_of_all(store)
        cycle = deadlock.find(self._standings, standings)
        if cycle is not None:
            self._lay_down(store, _DEADLOCK, {"towers": deadlock.describe(cycle, standings)})
        self._standings = standings
        return True

    def _standings_of_all(self, store: Store) -> dict[int, Standing]:
        """Where all towers were at their last heartbeats; empty where some have not given one yet."""
        places = [f"sign{tower}" for tower in range(self._topology.size)]
        found = {}
        for tower, data in enumerate(store.multi_get(places) if store.check(places) else ()):
            with contextlib.suppress(NotACardError):
                found[tower] = standing_of(messages.unseal(self._topology.token, places[tower], data))
        return found

    # -- leaving -----------------------------------------------------------------------------------------

    def leave(self, name: str, card: Card) -> list[Card] | None:
        """Lay down a last card under ``name``.

        Returns:
            The cards of all towers, in order, if this tower is the last one to leave its own; else None, at once. (A
            tower whose own process serves the store stays for a moment until all others have left theirs.)
        """
        found: list[Card] = []

        def leave(store: Store) -> None:
            self._lay_down(store, f"{name}{self._topology.index}", card)
            left = store.add(f"left {name}", 1)
            towers = range(self._topology.size)
            if left == len(towers):
                found.extend(c for tower in towers if (c := self._read(store, f"{name}{tower}")) is not None)
            end = time.monotonic() + _SERVING
            serves = self._topology.serves_store and self._topology.is_chief
            while serves and time.monotonic() < end and store.add(f"left {name}", 0) < len(towers):
                time.sleep(0.05)

        # By the thread that is there: some versions of Python (3.12.0 to 3.12.2) start no threads at exit.
        self._called.clear()
        self._call = leave
        self._wake.set()
        if self._thread.is_alive():
            self._called.wait(_PATIENCE + (_SERVING if self._topology.serves_store else 0.0))
        return found if len(found) == self._topology.size else None

    # -- seeing ------------------------------------------------------------------------------------------

    def others(self) -> list[int]:
        """All towers but this one."""
        return [tower for tower in range(self._topology.size) if tower != self._topology.index]

    def look(self, towers: Sequence[int], *, ask: bool) -> list[Sight]:
        """What can be seen of other towers, within two seconds or so.

        Args:
            ask: ask them for their stacks, too.
        """
        seen = self._see(towers)
        asked = [sight.tower for sight in seen if sight.lives] if ask else []
        if not asked:
            return seen
        answers = _patiently(_ANSWER + _PATIENCE, lambda: self._ask(asked)) or {}
        return [dataclasses.replace(sight, stack=answers.get(sight.tower, "")) for sight in self._see(towers)]

    def _see(self, towers: Sequence[int]) -> list[Sight]:
        signs = _patiently(_PATIENCE, lambda: self._signs(towers)) or {}
        now, found = time.monotonic(), []
        for tower in towers:
            sight = signs.get(tower, Sight(tower))
            if (record := self._record.beside(tower)) is not None:  # fresher than what came through the store
                place = record.read()
                since = now - place.since if place.since else 0.0
                silent = now - record.sign
                sight = dataclasses.replace(sight, place=place, seconds=since, silent=silent, patience=_SILENT)
            found.append(sight)
        return found

    def _ask(self, towers: Sequence[int]) -> dict[int, str]:
        store = self._store
        if store is None:
            return {}
        questions = {tower: store.add(f"questions{tower}", 1) for tower in towers}
        answers: dict[int, str] = {}
        end = time.monotonic() + _ANSWER
        while len(answers) < len(questions) and time.monotonic() < end:
            time.sleep(0.05)
            for tower, question in questions.items():
                answer = self._read(store, f"answer{tower}") if tower not in answers else None
                if answer is not None and answer["question"] >= question:
                    answers[tower] = answer["stack"]
        return answers

    def _silence(self, tower: int, beat: int) -> float:
        """For how many seconds this heartbeat has been the newest of a tower, as far as this one has looked."""
        now = time.monotonic()
        newest, since = self._observed.get(tower, (beat, now))
        if newest != beat:
            since = now
        self._observed[tower] = (beat, since)
        return now - since

    def _signs(self, towers: Sequence[int]) -> dict[int, Sight]:
        store = self._store
        found: dict[int, Sight] = {}
        for tower in towers if store is not None else ():
            if (sign := self._read(store, f"sign{tower}")) is not None:  # type: ignore[arg-type]
                standing = standing_of(sign)
                silent = self._silence(tower, standing.beat)
                host = "" if sign["host"] == self._host else sign["host"]
                found[tower] = Sight(tower, host, standing.place, standing.place.since + silent, silent)
        return found


def standing_of(sign: Card) -> Standing:
    """What a tower says of itself in a heartbeat."""
    return deadlock.from_json(sign)


def main_stack() -> str:
    """What the main thread does, as a traceback would show it, innermost call last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines = traceback.format_stack(frame)
    left_out = ["  …\n"] if len(lines) > _FRAMES else []
    return "".join(left_out + lines[-_FRAMES:]).rstrip()


def _patiently(seconds: float, look: Callable[[], _T]) -> _T | None:
    """What ``look`` returns, if it does so in time: a store whose host is gone may not answer at all."""
    try:
        return within(seconds, look)
    except Exception:  # the store is gone, or silent
        return None
