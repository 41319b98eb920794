"""Threads that run during training: heartbeats between towers through the store where they met, and a step's deadline.

Every tower reads a counter of long waits from the store, once per second on up to 128 towers. If the counter has
changed, the tower stores its heartbeat: its activity, and the collective it waits in. A tower that waits for another
one until the deadline reads the other's heartbeat, and queries its stack. A thread with its own connection sends the
heartbeats and answers. It ends when the store is gone. While towers keep waiting, the chief looks for deadlocks
(:mod:`towers.health.deadlock`).

[Note: requests of many towers] As long as no tower keeps waiting, each tower sends one request per second. From
:data:`PER_SECOND` towers on, the time between two requests of a tower grows with the number of towers, so the store
gets this number of requests per second on average.

[Note: hosts' clocks are not compared] The silence of a tower on another host starts when this tower first reads its
newest heartbeat.

[Note: towers that answer get time] After a failed wait, a tower waits for the answers of the others, which may take
long on a busy host. It waits as long as heartbeats of the other tower arrive, or its process can run. The thread that
sends heartbeats also answers, not the script's thread. A process that is stopped or gone is given up after 2.5 seconds.
A tower whose process is on another host is given up 10 seconds after its last heartbeat, later from 129 towers on.

[Note: the deadline of a step] A thread checks the deadline. It cannot run while other code holds the interpreter's
lock. Then only the deadlines of other towers' collectives apply.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import queue
import socket
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta

from torch.distributed import Store

from towers.errors import StepTimeoutError
from towers.health import deadlock, failure
from towers.health.deadlock import Beat
from towers.health.flight_recorder import Entered, entered
from towers.health.status import AVERAGING, Health, PeerStatus, Status, StatusRecord, Wait
from towers.health.timeout_messages import in_other_calls
from towers.joining.participant import Participant
from towers.joining.store import Message, SignedStore
from towers.system.messages import get_logger
from towers.system.timeouts import Deadline, clock, in_time, wait_until

INTERVAL = 1.0
"""Seconds between two heartbeats of up to :data:`PER_SECOND` towers."""

PER_SECOND = 128
"""The largest average number of requests per second of all towers while no tower keeps waiting."""

_FAST = 0.25  # seconds between two heartbeats while some tower keeps waiting
_BLOCKED, _DEADLOCK = "blocked", "deadlock"

_SILENT = 10.0  # seconds without a heartbeat after which a tower that does not answer counts as gone
_SILENT_AND_STOPPED = 2.5  # the same if its process is stopped or gone
_MOMENT = 0.5  # seconds for which a process may be stopped, by a debugger or a scheduler, and still counts as running
_LONGEST = 30.0  # the same if its process can run; and the time for a running tower to answer
_REQUEST = timedelta(seconds=30)  # for a request to the store by the heartbeat's own thread, also at exit
_STORE_SECONDS = 10.0  # seconds for a request by other threads, because the store's host may be busy
_SERVING = 5.0  # seconds that a process which serves the store waits for others that also end
_FEW = 16  # towers that are all asked for their stacks, and that all look for themselves
_TURN = 10.0  # seconds for one tower of many to look for the others
_FRAMES = 12  # the innermost frames of a stack
_HEAD_START = 3.0  # seconds by which waiting towers report later than others if a step takes too long

log = get_logger("towers")


def start(health: Health, tower: Participant, store: Store, step_seconds: float) -> None:
    """Starts the threads of this tower. They end with ``health``.

    Args:
        store: the store where the towers met.
        step_seconds: the longest time for a step; infinite for no limit.
    """
    if store.has_extended_api():  # type: ignore[attr-defined]  # not a file, which would grow with every heartbeat
        health.heartbeat = Heartbeat(health, tower, SignedStore(store, tower.token))
    elif tower.index == 0:
        log.warning(
            "torch.distributed was initialised through a file, so towers send no heartbeats: timeout errors do "
            "not name the positions of other towers, deadlocks are not detected, and models are not compared at "
            "the end of the program"
        )
    arguments = weakref.ref(health), health.record, tower.index, step_seconds
    threading.Thread(target=_watch_steps, args=arguments, name="towers-step-deadline", daemon=True).start()


class Heartbeat:
    """This tower's heartbeats, and its view of the other towers'.

    Args:
        health: this tower's; the heartbeat ends with it.
        tower: this tower, as it met the others.
        store: the store where they met.

    Attributes:
        tower: this tower's index.

    Raises:
        StartupError: the store has ended.
    """

    def __init__(self, health: Health, tower: Participant, store: SignedStore) -> None:
        self._health = weakref.ref(health)
        self._record = health.record
        self.tower, self._towers, self._serves = tower.index, range(len(tower.names)), tower.serves
        self._calls: queue.SimpleQueue[Callable[[SignedStore], object] | None] = queue.SimpleQueue()  # None: to end
        with tower.needs_server():
            self._store = store.connect_again("health", _REQUEST)  # can be shared: no request waits for other towers
        self._number = 0
        self._waited: Wait | None = None  # at the last heartbeat
        self._answered = 0  # queries
        self._blocked = -1  # how often towers have reported that they keep waiting
        self._interval = INTERVAL * max(1.0, len(tower.names) / PER_SECOND)
        self._fast = min(self._interval, _FAST * max(1.0, 4 * len(tower.names) / PER_SECOND))
        self._late = 2 * (self._interval - INTERVAL)  # seconds by which an answer may be later than with few towers
        self._beats: dict[int, Beat] = {}
        self._newest: dict[int, tuple[int, float]] = {}  # of each tower: its newest heartbeat and its arrival
        self._host = socket.gethostname()
        self._thread = threading.Thread(target=self._run, name="towers-heartbeat", daemon=True)
        atexit.register(self._stop)
        self._thread.start()

    def _stop(self) -> None:
        """Ends the thread. Its return from the store during the interpreter's finalization would abort the process."""
        self._calls.put(None)
        self._thread.join(_REQUEST.total_seconds())

    # -- sending -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        store = self._store
        log.debug("tower %d has started its heartbeats", self.tower)
        try:
            while (health := self._health()) is not None:
                hurries = self._look(store, health)
                del health
                with contextlib.suppress(queue.Empty):
                    if (call := self._calls.get(timeout=self._fast if hurries else self._interval)) is None:
                        return
                    call(store)
        except (RuntimeError, OSError):  # the store has ended, with its host or at the job's end: no more queries
            pass
        finally:
            atexit.unregister(self._stop)

    def _look(self, store: SignedStore, health: Health) -> bool:
        """Looks whether some tower keeps waiting, and if so, sends a heartbeat; returns whether to look again soon."""
        waits, waited = health.waits, self._waited
        self._waited = waits
        keeps_waiting = waits is not None and waits == waited
        before, self._blocked = self._blocked, store.add(_BLOCKED, int(keeps_waiting))
        is_watched = self._blocked != before
        if is_watched:
            self._send(store, health)
        if keeps_waiting:
            published = store.read(_DEADLOCK)
            health.deadlock = published["towers"] if published is not None else None
        if self.tower == 0 and before >= 0:
            self._look_for_deadlock(store, is_watched)
        return waits is not None or (self.tower == 0 and is_watched)

    def _send(self, store: SignedStore, health: Health) -> None:
        """Stores a heartbeat, and this tower's stack if another one has asked for it."""
        me = self.tower
        store.write(f"beat{me}", {**self._beat(health).as_json(), "host": self._host})
        asked = store.add(f"queries{me}", 0)
        if asked > self._answered:
            store.write(f"answer{me}", {"query": asked, "stack": main_stack(), "collectives": entered()})
            self._answered = asked

    def _beat(self, health: Health) -> Beat:
        status = self._record.read()
        status = dataclasses.replace(status, since=clock.monotonic() - status.since if status.since else 0.0)
        self._number += 1
        return Beat(self._number, status, health.begun(), health.waits, health.calls)

    def _look_for_deadlock(self, store: SignedStore, is_watched: bool) -> None:
        """Looks for a deadlock, as the chief does while some tower keeps waiting (see [Note: deadlocks])."""
        if not is_watched:
            self._beats = {}
            return
        messages = store.read_all([f"beat{tower}" for tower in self._towers])
        beats = {tower: Beat.from_json(message) for tower, message in enumerate(messages) if message is not None}
        cycle = deadlock.find_cycle(self._beats, beats)
        found = deadlock.describe(cycle, beats) if cycle is not None else deadlock.find_different_calls(beats)
        if found is not None:
            store.write(_DEADLOCK, {"towers": found})
        self._beats = beats

    # -- leaving -----------------------------------------------------------------------------------------

    def leave(self, name: str, message: Message) -> list[Message] | None:
        """Stores a last message under ``name``.

        A tower whose own process serves the store waits briefly until all others have stored theirs.

        Returns:
            The messages of all towers, in order, if this tower is the last one to store its own. Otherwise None, at
            once.
        """
        messages: list[Message] = []
        done = threading.Event()

        def leave(store: SignedStore) -> None:
            store.write(f"{name}{self.tower}", message)
            if store.add(f"left {name}", 1) == len(self._towers):
                stored = store.read_all([f"{name}{tower}" for tower in self._towers])
                messages.extend(m for m in stored if m is not None)
            if self._serves:
                wait_until(lambda: store.add(f"left {name}", 0) >= len(self._towers), _SERVING, pause=0.05)
            done.set()

        # With the existing thread: some versions of Python (3.12.0 to 3.12.2) start no threads at exit.
        self._calls.put(leave)
        wait_until(lambda: done.is_set() or not self._thread.is_alive(), _LONGEST)
        return messages if len(messages) == len(self._towers) else None

    # -- querying ----------------------------------------------------------------------------------------

    def others(self) -> list[int]:
        """Returns all towers but this one."""
        return [tower for tower in self._towers if tower != self.tower]

    def query(
        self, towers: Sequence[int], *, stacks: bool, explains: Callable[[Status], bool] = lambda status: True
    ) -> list[PeerStatus]:
        """Returns the known state of other towers.

        Args:
            stacks: whether to query their stacks, too; see [Note: towers that answer get time].
            explains: returns whether an activity may be the reason for the query. Of many towers, it requests the
                stacks of these, and of towers whose heartbeat is late.
        """
        self._refresh([tower for tower in towers if self._record.of_peer(tower) is None])
        peers = self._peers(towers)
        many = len(towers) > _FEW
        asked = [p.tower for p in peers if stacks and p.lives and (not many or self._may_explain(p, explains))]
        answers = self._ask(asked)
        now = {peer.tower: peer for peer in self._peers(asked)}  # a silent tower may have been woken to end
        found = []
        for peer in peers:
            answer = answers.get(peer.tower, {"stack": "", "collectives": {}})
            collectives = {group: Entered(*values) for group, values in answer["collectives"].items()}
            changes = {"stack": answer["stack"], "asked": peer.tower in asked, "collectives": collectives}
            found.append(dataclasses.replace(now.get(peer.tower, peer), **changes))
        return found

    def first_result(self, question: str, compute: Callable[[], list[str]]) -> list[str]:
        """Returns the result of ``compute`` on the first of many towers with the same question.

        The others read it. If each of a thousand towers read a thousand heartbeats, the store would be overloaded. If
        the first tower does not answer in time, the second one computes the result, and so on. Few towers all compute.
        """
        if len(self._towers) <= _FEW:
            return compute()
        name, messages = f"found {question}", list[Message]()
        place = in_time(_STORE_SECONDS, lambda: self._store.add(f"asks {question}", 1)) or 1

        def has_arrived() -> bool:
            if (message := self._store.read(name)) is not None:
                messages.append(message)
            return bool(messages)

        seconds = (place - 1) * (_TURN + self._late)
        if place > 1:
            in_time(seconds, lambda: wait_until(has_arrived, seconds, pause=self._interval / 2))
        if not messages:
            message: Message = {"found": compute()}
            stored = in_time(_STORE_SECONDS, lambda: self._store.publish(name, message))  # the first one counts
            messages.append(stored or message)
        found: list[str] = messages[0]["found"]
        return found

    def _may_explain(self, peer: PeerStatus, explains: Callable[[Status], bool]) -> bool:
        record = self._record.of_peer(peer.tower)
        is_late = peer.silent > self._interval + _MOMENT or (record is not None and not record.process_can_run())
        return peer.status is None or is_late or explains(peer.status)

    def _refresh(self, towers: Sequence[int]) -> None:
        """Lets towers send new heartbeats, and waits for these, at most as long as one takes."""

        def refresh() -> None:
            before = {tower: message["number"] for tower, message in self._beats_of(towers).items()}
            self._store.add(_BLOCKED, 1)

            def all_have_new() -> bool:
                now = self._beats_of(towers)
                return len(now) == len(towers) and all(now[each]["number"] > before.get(each, 0) for each in now)

            wait_until(all_have_new, self._interval + _MOMENT, pause=self._fast / 4)

        if towers:
            in_time(self._interval + _STORE_SECONDS, refresh)

    def _peers(self, towers: Sequence[int]) -> list[PeerStatus]:
        by_store = in_time(_STORE_SECONDS, lambda: self._read_beats(towers)) or {}
        records = {tower: record for tower in towers if (record := self._record.of_peer(tower)) is not None}
        stopped = _stopped(records)
        now, peers = clock.monotonic(), []
        for tower in towers:
            peer = by_store.get(tower, PeerStatus(tower))
            if (record := records.get(tower)) is not None:  # newer than the status from the store
                status = record.read()
                seconds = now - status.since if status.since else 0.0
                limit = _SILENT_AND_STOPPED if tower in stopped else _LONGEST
                peer = PeerStatus(tower, peer.host, status, seconds, now - record.last_beat, silence_limit=limit)
            peers.append(peer)
        return peers

    def _ask(self, towers: Sequence[int]) -> dict[int, Message]:
        answers: dict[int, Message] = {}

        def ask() -> None:
            queries, again = {tower: self._store.add(f"queries{tower}", 1) for tower in towers}, Deadline(0)
            while living := [peer.tower for peer in self._peers(towers) if peer.lives and peer.tower not in answers]:
                if again.has_passed():  # towers look for queries, and continue their heartbeats
                    self._store.add(_BLOCKED, 1)
                    again = Deadline(self._interval / 2)
                for tower in living:
                    answer = self._store.read(f"answer{tower}")
                    if answer is not None and answer["query"] >= queries[tower]:
                        answers[tower] = answer
                clock.sleep(0.05)

        in_time(_LONGEST + self._late, ask)  # a store whose host is gone may never answer
        return dict(answers)

    def _silence(self, tower: int, number: int) -> float:
        """Returns the seconds for which this heartbeat has been a tower's newest.

        See [Note: hosts' clocks are not compared].
        """
        now = clock.monotonic()
        newest, since = self._newest.get(tower, (number, now))
        if newest != number:
            since = now
        self._newest[tower] = (number, since)
        return now - since

    def _read_beats(self, towers: Sequence[int]) -> dict[int, PeerStatus]:
        peers: dict[int, PeerStatus] = {}
        for tower, message in self._beats_of(towers).items():
            beat = Beat.from_json(message)
            silent = self._silence(tower, beat.number)
            host = "" if message["host"] == self._host else message["host"]
            peers[tower] = PeerStatus(
                tower, host, beat.status, beat.status.since + silent, silent, silence_limit=_SILENT + self._late
            )
        return peers

    def _beats_of(self, towers: Sequence[int]) -> dict[int, Message]:
        """Returns the heartbeats in the store, by tower; with one request if all are there."""
        messages = self._store.read_all([f"beat{tower}" for tower in towers])
        messages = messages or [self._store.read(f"beat{tower}") for tower in towers]
        return {tower: message for tower, message in zip(towers, messages, strict=True) if message is not None}


def _stopped(records: Mapping[int, StatusRecord]) -> set[int]:
    """Returns the silent towers whose processes are gone, or stay stopped for :data:`_MOMENT`."""

    def cannot_run(towers: Iterable[int]) -> set[int]:
        return {tower for tower in towers if not records[tower].process_can_run()}

    now = clock.monotonic()
    found = cannot_run(tower for tower, record in records.items() if now - record.last_beat >= _SILENT_AND_STOPPED)
    deadline = Deadline(_MOMENT)
    while found and not deadline.has_passed():
        clock.sleep(0.02)
        found = cannot_run(found)
    return found


def _watch_steps(health: weakref.ref[Health], record: StatusRecord, tower: int, seconds: float) -> None:
    """Ends this tower when one of its steps takes too long; see [Note: the deadline of a step].

    Args:
        health: this tower's; the watch ends with it.
        record: the tower's record.
        tower: the tower's index.
        seconds: the longest time for a step; infinite for no limit.
    """
    pause = min(INTERVAL, seconds / 10)
    watched, deadline = 0, Deadline(seconds, 2 * pause)
    while health() is not None:
        clock.sleep(pause)
        record.beat()
        status = record.read()
        if not status.running or status.run != watched:
            watched = status.run
            deadline.restart()
        # A tower that waits for others lets them report first.
        waits = status.phase == AVERAGING or bool(status.call)
        if deadline.remaining() <= (-_HEAD_START if waits else 0.0) and (late := health()) is not None:
            _end_late(late, tower, seconds, waits=waits)


def _end_late(health: Health, tower: int, seconds: float, *, waits: bool) -> None:
    trace = f"Stack (most recent call last):\n{main_stack()}\n"
    others, _ = in_other_calls(health, stacks=waits)
    listing = f"; {others}" if others else ""
    failure.leave_report(
        StepTimeoutError(
            f"tower {tower} has been in one run for {seconds:.0f} s, {health.status}{listing} "
            "(CommunicationOptions.step_timeout_seconds)"
        ),
        trace,
    )
    os._exit(1)


def main_stack() -> str:
    """Returns the main thread's stack, in the form of a traceback, innermost call last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines = traceback.format_stack(frame)
    left_out = ["  …\n"] if len(lines) > _FRAMES else []
    return "".join(left_out + lines[-_FRAMES:]).rstrip()
