"""What a tower says of itself while it trains: step, phase, collective.

It costs some tenths of a microsecond to say, and is read when something goes wrong: by the process that started the
towers (:mod:`towers.health.status_record`) and by the towers that wait for this one (:mod:`towers.health.heartbeat`).
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol, TypeVar

from towers.errors import DeadlockError
from towers.health import failure
from towers.health.deadlock import Wait
from towers.health.status_record import Place, Record

if TYPE_CHECKING:
    from towers.health.heartbeat import Heartbeat

IN_STEP = "in the step's function"
IN_EVALUATION = "in the evaluation's function"
LOADING = "loading data"
BACKWARD = "backward"
AVERAGING = "averaging gradients"
OPTIMIZER = "optimizer.step()"
AFTER_OPTIMIZER = "after optimizer.step()"

_T = TypeVar("_T")
_END = object()


class Counted(Protocol):
    """A communicator, which counts the collectives that this tower has begun.

    Attributes:
        name: equal on all towers.
        count: how many there were.
    """

    name: str
    count: int


class Health:
    """Where this tower is.

    Attributes:
        run: how many runs (calls of ``strategy.run``) have begun; by it towers find out what belongs together.
        step: the training step that runs, else the last one; this is the count that people see, also in checkpoints.
            A run is a training step when it has a backward or an optimizer's step; at one tower each is.
        evaluates: whether the run that goes on is none of training, as far as is known; else the last one.
        phase: what the tower does now; empty where it is in the script's own code.
        record: where others read it; None where there are no others, and nothing is written.
        heartbeat: asks the other towers where they are, where there are any.
        exit_code: what this tower is about to end with, without having failed.
        waits: what this tower waits in; None where it does not wait.
        deadlock: why a wait will never end, once that is known.
    """

    def __init__(self, record: Record | None = None) -> None:
        self.run = 0
        self.step = 0
        self.evaluates = False
        self.phase = ""
        self.record = record
        self.heartbeat: Heartbeat | None = None
        self.exit_code = 0
        self.waits: Wait | None = None
        self.deadlock: str | None = None
        self._counted: weakref.WeakSet[Counted] = weakref.WeakSet()
        self._running = False
        self._trains = False
        self._done = 0  # training steps
        self._told = False  # how many those are

    def enter(self, phase: str) -> None:
        """From now on the tower does this ("writing the checkpoint"). Empty: nothing that has a name."""
        self.phase = phase
        if self.record is not None:
            self.record.enter(self.run, self.step, self._running, self.evaluates, _encoded(phase))

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
        elif not self._told:
            self._done = self.step
        self.enter("")

    def go_on_after(self, steps: int) -> None:
        """So many training steps are done, as a checkpoint says."""
        self.step = self._done = steps
        self.enter(self.phase)

    def count(self, steps: int) -> None:
        """So many training steps are done, which the script counts itself from now on."""
        self.go_on_after(steps)
        self._told = True

    def watch(self, communicator: Counted) -> None:
        """Tell the other towers how many of its collectives this tower has begun, while it lives."""
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
    def place(self) -> Place:
        """Where the tower is."""
        if self.record is not None:
            return self.record.read()
        return Place(self.run, self.step, self._running, self.evaluates, self.phase)

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
