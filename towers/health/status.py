"""What a tower does while it trains: step, phase, collective; and the record of it that other processes read.

Writing it costs some tenths of a microsecond. It is read when something goes wrong: by the process that started the
towers, and by towers that wait for this one (:mod:`towers.health.heartbeat`).

[Note: status records] A record is a small file in the private directory of the process that started the towers
(``TOWERS_STATUS_RECORD``, which our launchers set), mapped into the tower: what the tower has written stays when it is
killed, for half a microsecond a change. Other hosts, and towers under the user's own torchrun, learn it from heartbeats
through the store. At one tower the record is no file. A tower that holds the interpreter's lock sends no heartbeat and
answers no query; after 30 seconds (10 where its process cannot be seen) it reads as stopped.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import pathlib
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol, TypeVar

from towers.errors import DeadlockError
from towers.health import failure
from towers.health.peers import Peers, Status, Wait
from towers.system.newest import Newest
from towers.system.timeouts import clock
from towers.topology import STATUS_RECORD

IN_STEP = "in the step's function"
IN_EVALUATION = "in the evaluation's function"
LOADING = "loading data"
BACKWARD = "backward"
AVERAGING = "averaging gradients"
OPTIMIZER = "optimizer.step()"
AFTER_OPTIMIZER = "after optimizer.step()"

_BYTES = 256
_BEAT = struct.Struct("=qd")  # process id, last heartbeat
_STATUS = struct.Struct("=qq??d64s")  # run, step, whether it runs, whether it evaluates, since when, phase
_CALL = struct.Struct("=96s")
_CALL_AND_FLAGS = struct.Struct("=96s??")  # the same, whether it saves, whether it restores
_STATUS_AT = 16
_CALL_AT = 128
_SAVING_AT = 224
_RESTORES_AT = 225

_T = TypeVar("_T")
_END = object()


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
                if create:  # takes the room that it needs: where a disk is full, writing to a mapping ends the process
                    os.pwrite(descriptor, bytes(_BYTES - _STATUS_AT), _STATUS_AT)
                self._memory = mmap.mmap(descriptor, _BYTES)
            finally:
                os.close(descriptor)
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

    def enter(self, run: int, step: int, running: bool, evaluates: bool, phase: bytes) -> None:
        """The tower enters another phase."""
        _STATUS.pack_into(self._memory, _STATUS_AT, run, step, running, evaluates, clock.monotonic(), phase)

    def call(self, name: bytes) -> None:
        """The tower is in a collective of this name; empty: in none."""
        _CALL.pack_into(self._memory, _CALL_AT, name)

    def set_saving(self, saving: bool) -> None:
        """The tower is writing a checkpoint, or no longer."""
        self._memory[_SAVING_AT] = saving

    def set_restores(self) -> None:
        """The tower's script restores the newest checkpoint when it is started again."""
        self._memory[_RESTORES_AT] = True

    def beat(self) -> None:
        """A heartbeat of the tower."""
        _BEAT.pack_into(self._memory, 0, os.getpid(), clock.monotonic())

    @property
    def last_beat(self) -> float:
        """When the tower had its last heartbeat, in ``clock.monotonic()`` seconds of its host."""
        return float(_BEAT.unpack_from(self._memory)[1])

    def process_can_run(self) -> bool:
        """Whether the tower's process is there and not stopped, as far as the system says."""
        with contextlib.suppress(OSError):
            stat = pathlib.Path(f"/proc/{_BEAT.unpack_from(self._memory)[0]}/stat").read_text()
            return stat.rpartition(") ")[2][0] not in "TtZX"
        return False

    def read(self) -> Status:
        """What the tower does, or did when it ended."""
        run, step, running, evaluates, since, phase = _STATUS.unpack_from(self._memory, _STATUS_AT)
        call, saving, restores = _CALL_AND_FLAGS.unpack_from(self._memory, _CALL_AT)
        return Status(run, step, running, evaluates, _text(phase), since, _text(call), saving, restores)


def record_path(directory: os.PathLike[str] | str, tower: int) -> pathlib.Path:
    """The file of the record of ``tower`` in the directory of the process that starts it."""
    return pathlib.Path(directory) / f"status{tower}"


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="ignore")


class BatchInHand(NamedTuple):
    """The global batch that a script is at, the same on all towers, each of which has its share of it.

    Attributes:
        loop: which of the loops over distributed data, which all towers begin together.
        epoch, step: which epoch of the data, and which batch of it, from 0.
    """

    loop: int
    epoch: int
    step: int

    def __str__(self) -> str:
        return f"batch {self.step} of epoch {self.epoch} (loop {self.loop} over distributed data)"


def with_batch(call: str, batch: BatchInHand | None) -> str:
    """A call's name in messages, with the batch that it belongs to."""
    return call if batch is None else f"{call} with {batch}"


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
        run: how many runs (calls of ``strategy.run``) have begun; towers match their backwards by it.
        step: the training step that runs, else the last one; this is the count that people see, also in checkpoints.
            A run is a training step when it has a backward or an optimizer's step; at one tower each is.
        evaluates: whether the run that goes on is none of training, as far as is known; else the last one.
        phase: what the tower does now; empty where it is in the script's own code.
        loops: how many loops over distributed data have begun.
        batches: the newest batch that the main thread has taken of each loop over distributed data; what another thread
            takes ahead says nothing of where a script is.
        record: where it is written; in a file, other processes read it.
        heartbeat: the other towers, where there are any.
        exit_code: what this tower is about to end with, without having failed.
        waits: what this tower waits in; None where it does not wait.
        deadlock: why a wait will never end, once that is known.
        followers: called with each phase that the tower enters.
        callers: called with the name of each announced collective that begins, and with "" when it has succeeded.
    """

    def __init__(self, record: StatusRecord | None = None) -> None:
        self.run = 0
        self.step = 0
        self.evaluates = False
        self.phase = ""
        self.loops = 0
        self.batches = Newest[BatchInHand]()
        self.record = record or StatusRecord()
        self.heartbeat: Peers | None = None
        self.exit_code = 0
        self.waits: Wait | None = None
        self.deadlock: str | None = None
        self.followers: list[Callable[[str], object]] = []
        self.callers: list[Callable[[str], object]] = []
        self._counted: weakref.WeakSet[Counted] = weakref.WeakSet()
        self._running = False
        self._trains = False
        self._done = 0  # training steps
        self._counted_by_script = False

    @classmethod
    def of_this_tower(cls, phase: str) -> Health:
        """A new tower's, whose record is the file that the launcher reads, where there is one."""
        path = os.environ.get(STATUS_RECORD)
        record = None
        with contextlib.suppress(OSError):  # a directory that is gone must not keep a tower from working
            record = StatusRecord(path, create=path is not None)
        health = cls(record)
        health.enter(phase)
        return health

    def enter(self, phase: str) -> None:
        """The tower enters a phase ("writing the checkpoint"); an empty one is the script's own code."""
        self.phase = phase
        self.record.enter(self.run, self.step, self._running, self.evaluates, phase.encode())
        for follow in self.followers:
            follow(phase)

    def begin_run(self, evaluates: bool | None) -> None:
        """A run begins.

        Args:
            evaluates: whether it seems to be none of training; None where it counts as a step, whatever it does.
        """
        self.run += 1
        self.evaluates = bool(evaluates)
        self.step = self._done + (not evaluates)
        self._running, self._trains = True, evaluates is None
        self.enter(IN_EVALUATION if evaluates else IN_STEP)

    def train(self) -> None:
        """The run that goes on is a training step: there is a backward in it, or an optimizer steps."""
        self._trains = True
        if self._running and self.evaluates:
            self.evaluates = False
            self.step = self._done + 1
            self.enter(IN_STEP if self.phase == IN_EVALUATION else self.phase)

    def end_run(self) -> None:
        """The run is over. Not to be called when it failed: then it is where the tower ended."""
        self._running = False
        self.evaluates = not self._trains
        if self.evaluates:
            self.step = self._done
        elif not self._counted_by_script:
            self._done = self.step
        self.enter("")

    def go_on_after(self, steps: int) -> None:
        """Continue after so many training steps, the number of a checkpoint."""
        self.step = self._done = steps
        self.enter(self.phase)

    def count(self, steps: int) -> None:
        """Take over the script's own count of training steps, from now on."""
        self.go_on_after(steps)
        self._counted_by_script = True

    def watch(self, communicator: Counted) -> None:
        """Let the other towers know how many collectives of ``communicator`` this tower has begun, while it lives."""
        self._counted.add(communicator)

    def begun(self) -> dict[str, int]:
        """How many collectives this tower has begun, by name of the communicator."""
        try:
            return {communicator.name: communicator.count for communicator in self._counted}
        except RuntimeError:  # one was added meanwhile
            return {}

    def check_deadlock(self) -> None:
        """Check that a wait may still end.

        Raises:
            DeadlockError: it will not, for the others wait for this tower elsewhere.
        """
        if self.deadlock is not None:
            raise DeadlockError(self.deadlock)

    @property
    def status(self) -> Status:
        """What the tower does."""
        return self.record.read()

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """``with health.during(phase):`` enters a phase, and leaves it when the block is done, not when it fails."""
        before = self.phase
        self.enter(phase)
        yield
        self.enter(before)

    @contextlib.contextmanager
    def at(self, call: str) -> Iterator[None]:
        """``with health.at("reduce('sum')"):`` names the collective that the block makes, until that has succeeded."""
        self._tell(call)
        yield
        self._tell("")

    def _tell(self, call: str) -> None:
        self.record.call(call.encode())
        for follow in self.callers:
            follow(call)

    def saving(self) -> contextlib.AbstractContextManager[None]:
        """Inside, a checkpoint is being written, by whatever thread: a job that fails gives it time to be done."""
        return failure.saving(self.record.set_saving)

    def each(self, phase: str, items: Iterable[_T]) -> Iterator[_T]:
        """``items``, as they are; while one is waited for the tower is in ``phase``."""
        iterator = iter(items)
        while True:
            with self.during(phase):
                item = next(iterator, _END)
            if item is _END:
                return
            yield item  # type: ignore[misc]
