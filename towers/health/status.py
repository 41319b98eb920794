"""A tower's activity in training (step, phase, collective), the record of it that other processes read, and peers'.

Writing it costs some tenths of a microsecond. When something goes wrong, it is read by the process that started the
towers, and by towers that wait for this one (:mod:`towers.health.heartbeat`).

[Note: status records] A record is a small file in the private directory of the process that started the towers
(``TOWERS_STATUS_RECORD``, which ``mirrored``'s launchers set), mapped into the tower. Its content remains when the
tower is killed. It costs half a microsecond per change. Other hosts, and towers under the user's own torchrun, receive
it in heartbeats through the store. With one tower, the record is not a file. A tower that holds the interpreter's lock
sends no heartbeat and answers no query. After 30 seconds (10 if its process cannot be seen) it is reported as stopped.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import mmap
import os
import pathlib
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from towers.errors import DeadlockError
from towers.health import failure
from towers.health.flight_recorder import Entered
from towers.joining.store import Message
from towers.system.timeouts import clock
from towers.topology import STATUS_RECORD

T = TypeVar("T")


class Newest(Generic[T]):
    """Values of loops, which may end in any order (two iterators under ``zip`` do) and run in several threads."""

    def __init__(self) -> None:
        self._by_loop: dict[int, T] = {}
        self._begun = 0

    def begin(self) -> int:
        """Returns the index of a loop that starts, from 1."""
        self._begun += 1
        return self._begun

    def set(self, loop: int, value: T) -> None:
        """Sets a loop's value, which is now the newest."""
        self._by_loop.pop(loop, None)
        self._by_loop[loop] = value

    def end(self, loop: int) -> None:
        """Forgets a loop that is over."""
        self._by_loop.pop(loop, None)

    @property
    def value(self) -> T | None:
        """The newest value among the loops that are not over."""
        values = list(self._by_loop.values())  # at once: another thread's loop may start or end at any time
        return values[-1] if values else None


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

_END = object()


@dataclasses.dataclass(frozen=True)
class Status:
    """A tower's current activity.

    Attributes:
        run: the number of runs that have started, counted identically on all towers.
        step: the running training step, or the last one if none runs: the number that a checkpoint has.
        running: whether the last run still runs.
        evaluates: whether the run is not a training step.
        phase: the tower's phase; empty while it is in the script's own code.
        since: when the phase started, in ``clock.monotonic()`` seconds of its host.
        call: the collective that it is in, if that has a name.
        saving: whether it is writing a checkpoint.
        restores: whether its script restores the newest checkpoint when it is started again.
    """

    run: int = 0
    step: int = 0
    running: bool = False
    evaluates: bool = False
    phase: str = ""
    since: float = 0.0
    call: str = ""
    saving: bool = False
    restores: bool = False

    @property
    def is_between_runs(self) -> bool:
        """Whether no run is in progress, and there has been a run."""
        return self.run > 0 and not self.running

    @property
    def when(self) -> str:
        """The step, as part of a sentence."""
        if self.running and not self.evaluates:
            return f"in step {self.step}"
        when = f"after step {self.step}" if self.step else "before its first step"
        return f"in an evaluation {when}" if self.running else when

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.when, self.phase, self.call and f"at {self.call}")))


@dataclasses.dataclass(frozen=True)
class PeerStatus:
    """One tower's view of another.

    Attributes:
        tower: the other tower.
        host: the other tower's host, if that is another host.
        status: its activity when it was last seen; None if it was never seen.
        seconds: for how long it has been doing that.
        silent: seconds since its last heartbeat. If that arrived through the store, only the time for which this tower
            has watched counts, because the clocks of hosts differ.
        stack: its main thread's stack, if it has answered a query.
        silence_limit: the number of silent seconds after which it counts as gone.
        asked: whether it was asked for its stack.
        collectives: the collectives of c10d's groups that it was in when it answered.
    """

    tower: int
    host: str = ""
    status: Status | None = None
    seconds: float = 0.0
    silent: float = 0.0
    stack: str = ""
    silence_limit: float = math.inf
    asked: bool = False
    collectives: Mapping[str, Entered] = dataclasses.field(default_factory=dict)

    @property
    def lives(self) -> bool:
        """Whether it has answered, or had a recent heartbeat."""
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
    """The other towers, which can be queried: :class:`towers.health.heartbeat.Heartbeat`.

    Attributes:
        tower: this tower's index.
    """

    tower: int

    def others(self) -> list[int]:
        """Returns all towers but this one."""

    def query(
        self, towers: Sequence[int], *, stacks: bool, explains: Callable[[Status], bool] = lambda status: True
    ) -> list[PeerStatus]:
        """Returns the known state of other towers; see :meth:`towers.health.heartbeat.Heartbeat.query`."""

    def first_result(self, question: str, compute: Callable[[], list[str]]) -> list[str]:
        """Returns the result of ``compute`` on the first of many towers with the same question."""

    def leave(self, name: str, message: Message) -> list[Message] | None:
        """Stores a last message under ``name``, and returns all towers' messages if this tower's is the last one."""


@dataclasses.dataclass(frozen=True)
class Wait:
    """A collective that a tower waits in.

    Attributes:
        communicator: its name, equal on all towers.
        number: the index of the collective among the communicator's.
        towers: the towers that take part in it.
    """

    communicator: str
    number: int
    towers: Sequence[int]


class StatusRecord:
    """One tower's record, as the tower writes it or as another process reads it; see [Note: status records].

    Args:
        path: its file. None: the record is kept in this process.
        create: whether to create the file, or reset it, as the tower does when it starts.

    Raises:
        OSError: the file cannot be mapped.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, create: bool = False) -> None:
        self._path = pathlib.Path(path) if path else None
        self._memory: mmap.mmap | bytearray = bytearray(_BYTES)
        if self._path is not None:
            # Never truncated: an earlier strategy of this process may have mapped it.
            descriptor = os.open(self._path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
            try:
                if create:  # reserves the space: on a full disk, writing to a mapping ends the process
                    os.pwrite(descriptor, bytes(_BYTES - _STATUS_AT), _STATUS_AT)
                self._memory = mmap.mmap(descriptor, _BYTES)
            finally:
                os.close(descriptor)
        if create or path is None:
            self.beat()

    @classmethod
    def find(cls, directory: os.PathLike[str] | str, tower: int) -> StatusRecord | None:
        """Returns the record of ``tower`` in the directory of the process that started it, or None if there is none."""
        with contextlib.suppress(OSError, ValueError):
            return cls(record_path(directory, tower))
        return None

    def of_peer(self, tower: int) -> StatusRecord | None:
        """Returns the record of another tower that the same process has started, or None if there is none."""
        return None if self._path is None else self.find(self._path.parent, tower)

    def enter(self, run: int, step: int, running: bool, evaluates: bool, phase: bytes) -> None:
        """Records that the tower enters another phase."""
        _STATUS.pack_into(self._memory, _STATUS_AT, run, step, running, evaluates, clock.monotonic(), phase)

    def call(self, name: bytes) -> None:
        """Records that the tower is in a collective of this name. Empty: it is in none."""
        _CALL.pack_into(self._memory, _CALL_AT, name)

    def set_saving(self, saving: bool) -> None:
        """Records whether the tower is writing a checkpoint."""
        self._memory[_SAVING_AT] = saving

    def set_restores(self) -> None:
        """Records that the tower's script restores the newest checkpoint when it is started again."""
        self._memory[_RESTORES_AT] = True

    def beat(self) -> None:
        """Records a heartbeat of the tower."""
        _BEAT.pack_into(self._memory, 0, os.getpid(), clock.monotonic())

    @property
    def last_beat(self) -> float:
        """The time of the tower's last heartbeat, in ``clock.monotonic()`` seconds of its host."""
        return float(_BEAT.unpack_from(self._memory)[1])

    def process_can_run(self) -> bool:
        """Returns whether the tower's process exists and is not stopped, as far as the system reports it."""
        with contextlib.suppress(OSError):
            stat = pathlib.Path(f"/proc/{_BEAT.unpack_from(self._memory)[0]}/stat").read_text()
            return stat.rpartition(") ")[2][0] not in "TtZX"
        return False

    def read(self) -> Status:
        """Returns the tower's activity, which is its last one if it has ended."""
        run, step, running, evaluates, since, phase = _STATUS.unpack_from(self._memory, _STATUS_AT)
        call, saving, restores = _CALL_AND_FLAGS.unpack_from(self._memory, _CALL_AT)
        return Status(run, step, running, evaluates, _text(phase), since, _text(call), saving, restores)


def record_path(directory: os.PathLike[str] | str, tower: int) -> pathlib.Path:
    """Returns the file of ``tower``'s record, in the directory of the process that starts it."""
    return pathlib.Path(directory) / f"status{tower}"


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode(errors="ignore")


class BatchInHand(NamedTuple):
    """The global batch that a script is processing. It is the same on all towers, and each tower has its share of it.

    Attributes:
        loop: the index of the loop over distributed data. All towers start a loop together.
        epoch, step: the epoch of the data, and the index of the batch in it, from 0.
    """

    loop: int
    epoch: int
    step: int

    def __str__(self) -> str:
        return f"batch {self.step} of epoch {self.epoch} (loop {self.loop} over distributed data)"


def with_batch(call: str, batch: BatchInHand | None) -> str:
    """Returns a call's name for messages, with the batch that it belongs to."""
    return call if batch is None else f"{call} with {batch}"


class Place(NamedTuple):
    """A tower's place in the script. Towers that are in step are at equal ones.

    Attributes:
        run: the number of runs that have started.
        step: the running training step, or the last one if none runs.
        batch: the newest global batch; None: not in a loop over distributed data.
    """

    run: int
    step: int
    batch: BatchInHand | None


class Counted(Protocol):
    """A communicator, which counts the collectives that this tower has started.

    Attributes:
        name: equal on all towers.
        count: the number of these collectives.
    """

    name: str
    count: int


class Health:
    """This tower's activity, and its view of the others.

    Attributes:
        run: the number of runs (calls of ``strategy.run``) that have started.
        step: the running training step, or the last one if none runs. Users see this number, also in checkpoints. A run
            is a training step if it has a backward or an optimizer's step.
        evaluates: whether the present run, or the last one if none runs, is not a training step, as far as is known.
        trains: whether the present run is known to be a training step.
        phase: the tower's phase; empty while it is in the script's own code.
        counted_by_script: whether the script counts training steps itself, so that several runs may be one.
        batches: the newest batch that the main thread has taken, for each loop over distributed data. A batch that
            another thread takes ahead does not show the script's position.
        record: the record of the status. If it is a file, other processes read it.
        heartbeat: the other towers, or None if there are none.
        exit_code: the code with which this tower is about to end, without a failure.
        waits: the collective that this tower waits in. None: it does not wait. Collectives have one order, so never do
            two threads wait in one.
        deadlock: why a wait will never end, once that is known.
        calls: the newest numbered calls (:meth:`number`), each with its number.
        followers: are called with each phase that the tower enters.
        callers: are called with the name of each announced collective that starts, and with "" after its success.
    """

    def __init__(self, record: StatusRecord | None = None) -> None:
        self.run = 0
        self.step = 0
        self.evaluates = False
        self.phase = ""
        self.batches = Newest[BatchInHand]()
        self.record = record or StatusRecord()
        self.heartbeat: Peers | None = None
        self.exit_code = 0
        self.waits: Wait | None = None
        self.deadlock: str | None = None
        self.calls: tuple[tuple[int, str], ...] = ()
        self.followers: list[Callable[[str], object]] = []
        self.callers: list[Callable[[str], object]] = []
        self._counted: weakref.WeakSet[Counted] = weakref.WeakSet()
        self._running = False
        self.trains = False
        self._done = 0  # training steps
        self.counted_by_script = False

    @classmethod
    def of_this_tower(cls, phase: str) -> Health:
        """Returns a new tower's health. Its record is the file that the launcher reads, if there is one."""
        path = os.environ.get(STATUS_RECORD)
        record = None
        with contextlib.suppress(OSError):  # a missing directory must not stop a tower
            record = StatusRecord(path, create=path is not None)
        health = cls(record)
        health.enter(phase)
        return health

    def enter(self, phase: str) -> None:
        """Enters a phase ("writing the checkpoint"). An empty phase is the script's own code."""
        self.phase = phase
        self.record.enter(self.run, self.step, self._running, self.evaluates, phase.encode())
        for follow in self.followers:
            follow(phase)

    def begin_run(self, evaluates: bool) -> None:
        """Records the start of a run.

        Args:
            evaluates: whether it does not seem to be a training step.
        """
        self.run += 1
        self.evaluates = evaluates
        self.step = self._done + (not evaluates)
        self._running, self.trains = True, False
        self.enter(IN_EVALUATION if evaluates else IN_STEP)

    def train(self) -> None:
        """Records that the present run is a training step: it contains a backward, or an optimizer steps."""
        self.trains = True
        if self._running and self.evaluates:
            self.evaluates = False
            self.step = self._done + 1
            self.enter(IN_STEP if self.phase == IN_EVALUATION else self.phase)

    def end_run(self) -> None:
        """Records the end of a run.

        It must not be called for a failed run, so that the status shows where the tower ended.
        """
        self._running = False
        self.evaluates = not self.trains
        if self.evaluates:
            self.step = self._done
        elif not self.counted_by_script:
            self._done = self.step
        self.enter("")

    def go_on_after(self, steps: int) -> None:
        """Continues after ``steps`` training steps, the number of a checkpoint."""
        self.step = self._done = steps
        self.enter(self.phase)

    def count(self, steps: int) -> None:
        """Uses the script's own count of training steps from now on."""
        self.go_on_after(steps)
        self.counted_by_script = True

    def watch(self, communicator: Counted) -> None:
        """Reports to the other towers how many collectives of ``communicator`` this tower has started."""
        self._counted.add(communicator)

    def begun(self) -> dict[str, int]:
        """Returns the number of collectives that this tower has started, by name of the communicator."""
        try:
            return {communicator.name: communicator.count for communicator in self._counted}
        except RuntimeError:  # one was added during the iteration
            return {}

    def number(self, call: str) -> None:
        """Numbers a call that all towers make in the same order, for the other towers."""
        number = self.calls[-1][0] + 1 if self.calls else 0
        self.calls = (*self.calls[-3:], (number, call))

    def check_deadlock(self) -> None:
        """Checks that a wait may still end.

        Raises:
            DeadlockError: it will not, because the others wait for this tower elsewhere.
        """
        if self.deadlock is not None:
            raise DeadlockError(self.deadlock)

    @property
    def place(self) -> Place:
        """The tower's place in the script."""
        return Place(self.run, self.step, self.batches.value)

    @property
    def status(self) -> Status:
        """The tower's activity."""
        return self.record.read()

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Enters a phase with ``with health.during(phase):``. The phase ends with the block, except after a failure."""
        before = self.phase
        self.enter(phase)
        yield
        self.enter(before)

    @contextlib.contextmanager
    def at(self, call: str) -> Iterator[None]:
        """Names the collective of the block in ``with health.at("reduce('sum')"):``, until the block has succeeded."""
        self._tell(call)
        yield
        self._tell("")

    def _tell(self, call: str) -> None:
        self.record.call(call.encode())
        for follow in self.callers:
            follow(call)

    def saving(self) -> contextlib.AbstractContextManager[None]:
        """Marks that a checkpoint is being written inside, by any thread: a job that fails gives it time to finish."""
        return failure.saving(self.record.set_saving)

    def each(self, phase: str, items: Iterable[T]) -> Iterator[T]:
        """Yields ``items`` unchanged. While the tower waits for an item, it is in ``phase``."""
        iterator = iter(items)
        while True:
            with self.during(phase):
                item = next(iterator, _END)
            if item is _END:
                return
            yield item  # type: ignore[misc]
