"""What a tower does while it trains: step, phase, collective; and the record of it that other processes read.

Writing it costs some tenths of a microsecond. It is read when something goes wrong: by the process that started the
towers, and by towers that wait for this one (:mod:`towers.health.heartbeat`).

[Note: status records] A record is a small file in the private directory of the process that started the towers
(``TOWERS_STATUS_RECORD``, which our launchers set), mapped into the tower: what the tower has written stays when it is
killed, for half a microsecond a change. Other hosts, and towers under the user's own torchrun, learn it from heartbeats
through the store. At one tower nothing is written. A tower that holds the interpreter's lock sends no heartbeat and
answers no query, so it reads as stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import mmap
import os
import pathlib
import struct
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from towers.errors import DeadlockError
from towers.health import failure
from towers.joining.store import Message
from towers.topology import STATUS_RECORD

IN_STEP = "in the step's function"
LOADING = "loading data"
BACKWARD = "backward"
AVERAGING = "averaging gradients"
OPTIMIZER = "optimizer.step()"
AFTER_OPTIMIZER = "after optimizer.step()"

_BYTES = 256
_BEAT = struct.Struct("=qd")  # process id, last heartbeat
_STATUS = struct.Struct("=q?d64s")  # step, whether it runs, since when, phase
_CALL = struct.Struct("=96s")
_STATUS_AT = 16
_CALL_AT = 128
_SAVING_AT = 224

_T = TypeVar("_T")
_END = object()


@dataclasses.dataclass(frozen=True)
class Status:
    """What a tower does.

    Attributes:
        step: how many steps have begun.
        running: whether the last of them still runs.
        phase: what the tower does there; empty where it is in the script's own code.
        since: when it began with that, in ``time.monotonic()`` seconds of its host.
        call: the collective that it is in, if that has a name.
    """

    step: int = 0
    running: bool = False
    phase: str = ""
    since: float = 0.0
    call: str = ""

    def __str__(self) -> str:
        when = f"{'in' if self.running else 'after'} step {self.step}" if self.step else "before its first step"
        return ", ".join(filter(None, (when, self.phase, self.call and f"at {self.call}")))


class StatusRecord:
    """One tower's record, as the tower writes it or as another process reads it; see [Note: status records].

    Args:
        path: its file; None keeps it in this process.
        create: make the file anew, as the tower does when it starts.

    Raises:
        OSError: the file cannot be mapped.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, create: bool = False) -> None:
        self._path = pathlib.Path(path) if path else None
        self._memory: mmap.mmap | bytearray = bytearray(_BYTES)
        if self._path is not None:
            # Never made shorter: an earlier strategy of this process may have it mapped.
            descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
            try:
                if create:
                    os.ftruncate(descriptor, _BYTES)
                self._memory = mmap.mmap(descriptor, _BYTES)
            finally:
                os.close(descriptor)
            if create:
                self.enter(0, False, b"")
                self.call(b"")
                self.save(False)
        if create or path is None:
            self.beat()

    @classmethod
    def find(cls, directory: os.PathLike[str] | str, tower: int) -> StatusRecord | None:
        """The record of ``tower`` in the directory of the process that started it; None where there is none."""
        with contextlib.suppress(OSError, ValueError):
            return cls(record_path(directory, tower))
        return None

    def of_peer(self, tower: int) -> StatusRecord | None:
        """The record of another tower that the same process has started; None where there is none."""
        return None if self._path is None else self.find(self._path.parent, tower)

    def enter(self, step: int, running: bool, phase: bytes) -> None:
        """The tower enters another phase."""
        _STATUS.pack_into(self._memory, _STATUS_AT, step, running, time.monotonic(), phase)

    def call(self, name: bytes) -> None:
        """The tower is in a collective of this name; empty: in none."""
        _CALL.pack_into(self._memory, _CALL_AT, name)

    def save(self, saving: bool) -> None:
        """The tower is writing a checkpoint, or no longer."""
        self._memory[_SAVING_AT] = saving

    def beat(self) -> None:
        """A heartbeat of the tower."""
        _BEAT.pack_into(self._memory, 0, os.getpid(), time.monotonic())

    @property
    def saving(self) -> bool:
        """Whether the tower is writing a checkpoint."""
        return self._memory[_SAVING_AT] != 0

    @property
    def last_beat(self) -> float:
        """When the tower had its last heartbeat, in ``time.monotonic()`` seconds of its host."""
        return float(_BEAT.unpack_from(self._memory)[1])

    def read(self) -> Status:
        """What the tower does, or did when it ended."""
        step, running, since, phase = _STATUS.unpack_from(self._memory, _STATUS_AT)
        (call,) = _CALL.unpack_from(self._memory, _CALL_AT)
        return Status(step, running, _text(phase), since, _text(call))


def record_path(directory: os.PathLike[str] | str, tower: int) -> pathlib.Path:
    """The file of the record of ``tower`` in the directory of the process that starts it."""
    return pathlib.Path(directory) / f"status{tower}"


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="ignore")


@dataclasses.dataclass(frozen=True)
class PeerStatus:
    """What one tower knows of another.

    Attributes:
        tower: the other.
        host: where it runs, if that is another host.
        status: what it does, or did when it was last seen; None when it was never seen.
        seconds: for how long it has been doing that.
        silent: seconds since its last heartbeat; where that came through the store, as far as this tower has watched,
            for the clocks of hosts differ.
        stack: of its main thread, if it has answered a query.
        silence_limit: after so many silent seconds it counts as gone.
    """

    tower: int
    host: str = ""
    status: Status | None = None
    seconds: float = 0.0
    silent: float = 0.0
    stack: str = ""
    silence_limit: float = math.inf

    @property
    def lives(self) -> bool:
        """Whether it has answered, or had a heartbeat a moment ago."""
        return bool(self.stack) or (self.status is not None and self.silent < self.silence_limit)

    def __str__(self) -> str:
        name = f"tower {self.tower}{self.host and f' on {self.host}'}"
        if self.status is None:
            return f"nothing is known of {name}"
        if self.lives:
            return f"{name} is {self.status}, for {self.seconds:.0f} s"
        return (
            f"{name} has sent no heartbeat for {self.silent:.0f} s (stopped, or its host is gone); it was last seen "
            f"{self.status}"
        )


class Peers(Protocol):
    """The other towers, which can be queried: :class:`towers.health.heartbeat.Heartbeat`."""

    def others(self) -> list[int]:
        """All towers but this one."""

    def query(self, towers: Sequence[int], *, stacks: bool) -> list[PeerStatus]:
        """What is known of other towers, and with ``stacks`` what they answer."""

    def leave(self, name: str, message: Message) -> list[Message] | None:
        """Leave a last message under ``name``; all towers' messages, if this tower is the last one to leave its own."""


@dataclasses.dataclass(frozen=True)
class Wait:
    """A collective that a tower waits in.

    Attributes:
        communicator: its name, equal on all towers.
        number: which of the communicator's collectives it is.
        towers: those that take part in it.
    """

    communicator: str
    number: int
    towers: Sequence[int]


class Counted(Protocol):
    """A communicator, which counts the collectives that this tower has begun.

    Attributes:
        name: equal on all towers.
        count: how many there were.
    """

    name: str
    count: int


class Health:
    """What this tower does, and what it knows of the others.

    Attributes:
        step: how many steps (calls of ``strategy.run``) have begun.
        phase: what the tower does now; empty where it is in the script's own code.
        record: where other processes read it; None where there are none, and nothing is written.
        heartbeat: the other towers, where there are any.
        exit_code: what this tower is about to end with, without having failed.
        waits: what this tower waits in; None where it does not wait.
        deadlock: why a wait will never end, once that is known.
    """

    def __init__(self, record: StatusRecord | None = None) -> None:
        self.step = 0
        self.phase = ""
        self.record = record
        self.heartbeat: Peers | None = None
        self.exit_code = 0
        self.waits: Wait | None = None
        self.deadlock: str | None = None
        self._counted: weakref.WeakSet[Counted] = weakref.WeakSet()
        self._running = False

    @classmethod
    def of_this_tower(cls, phase: str) -> Health:
        """With a new record, in the file that the process that started this tower reads, where there is one."""
        path = os.environ.get(STATUS_RECORD)
        record = StatusRecord()
        with contextlib.suppress(OSError):  # a directory that is gone must not keep a tower from working
            record = StatusRecord(path, create=path is not None)
        health = cls(record)
        health.enter(phase)
        return health

    def enter(self, phase: str) -> None:
        """From now on the tower is in this phase ("writing the checkpoint"). Empty: in none that has a name."""
        self.phase = phase
        if self.record is not None:
            self.record.enter(self.step, self._running, _encoded(phase))

    def begin_step(self) -> None:
        """A step begins."""
        self.step += 1
        self._running = True
        self.enter(IN_STEP)

    def end_step(self) -> None:
        """The step is over. Not to be called when it failed: then the tower ended in it."""
        self._running = False
        self.enter("")

    def watch(self, communicator: Counted) -> None:
        """While it lives, the other towers learn how many of its collectives this tower has begun."""
        self._counted.add(communicator)

    def begun(self) -> dict[str, int]:
        """By name of the communicator, how many collectives this tower has begun."""
        try:
            return {communicator.name: communicator.count for communicator in self._counted}
        except RuntimeError:  # one was added meanwhile
            return {}

    def check_deadlock(self) -> None:
        """See that a wait may still end.

        Raises:
            DeadlockError: it will not, for the others wait for this tower elsewhere.
        """
        if self.deadlock is not None:
            raise DeadlockError(self.deadlock)

    @property
    def status(self) -> Status:
        """What the tower does."""
        return self.record.read() if self.record is not None else Status(self.step, self._running, self.phase)

    def during(self, phase: str) -> _During:
        """``with health.during(phase):`` enters a phase, and leaves it when the block is done, not when it fails."""
        return _During(self, phase)

    def at(self, call: str) -> _At:
        """``with health.at("reduce('sum')"):`` names the collective that the block makes."""
        return _At(self, call)

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """While a checkpoint is being written, by whatever thread: a job that fails gives it some time to be done."""
        with failure.saving(self.record.save if self.record is not None else lambda saving: None):
            yield

    def each(self, phase: str, items: Iterable[_T]) -> Iterator[_T]:
        """``items``, as they are; while one is waited for the tower is in ``phase``."""
        iterator = iter(items)
        while True:
            with self.during(phase):
                item = next(iterator, _END)
            if item is _END:
                return
            yield item  # type: ignore[misc]


class _During:
    __slots__ = ("_before", "_health", "_phase")

    def __init__(self, health: Health, phase: str) -> None:
        self._health, self._phase = health, phase

    def __enter__(self) -> None:
        self._before = self._health.phase
        self._health.enter(self._phase)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self._health.enter(self._before)


class _At:
    __slots__ = ("_call", "_health")

    def __init__(self, health: Health, call: str) -> None:
        self._health, self._call = health, call

    def __enter__(self) -> None:
        if (record := self._health.record) is not None:
            record.call(self._call.encode())

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None and (record := self._health.record) is not None:
            record.call(b"")


@functools.lru_cache(64)
def _encoded(phase: str) -> bytes:
    return phase.encode()
