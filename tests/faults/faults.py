"""A fault at a chosen place: what happens, on which tower, in which step, in which phase of it."""

from __future__ import annotations

import dataclasses
import errno
import os
import pathlib
import signal
import threading
import time
from typing import Any

import torch

import mirrored
from mirrored.checkpoint.folder import Disk
from tests.support.meeting import shorten_deadlines
from tests.support.waiting import forever, wait_until
from towers.collectives.shared_memory.barrier import Barrier
from towers.collectives.shared_memory.regions import Regions

ACTIONS = ("raise", "SIGKILL", "SIGTERM", "SIGSTOP")
DEATHS = ("stuck thread", "early exit", "deadlock")
PHASES = (
    "data",
    "forward",
    "all-reduce",
    "before optimizer.step",
    "after optimizer.step",
    "writing",
    "before rename",
    "after rename",
)
SAVING = PHASES[5:]
_ALONE = ("data", "forward", "before optimizer.step", "after optimizer.step")  # the phases without a collective


class Injected(RuntimeError):
    """The fault that was asked for."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """What is to happen, once.

    Attributes:
        action: one of :data:`ACTIONS`, :data:`DEATHS`, "until told" (to end, by a signal), "until cut" (from the other
            host, as a file beside the trace says), "hang" (for ever, also after it was told) or "disk
            full".
        phase: one of :data:`PHASES`.
        tower: on which.
        step: in which step of training, from 0; for the phases of saving, in the checkpoint after that step.
    """

    action: str
    phase: str
    tower: int
    step: int

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Read ``action:phase:tower:step``."""
        action, phase, tower, step = text.split(":")
        return cls(action, phase, int(tower), int(step))

    def __str__(self) -> str:
        return f"{self.action}:{self.phase}:{self.tower}:{self.step}"


class Injector:
    """Lets a fault happen when this tower comes to its place.

    Args:
        trace: a file that is made when it does. Where there is one already, this is a run that goes on: no fault.
        deadline: seconds that a collective may take from then on.

    Attributes:
        step: the step that is under way.
    """

    def __init__(self, fault: Fault | None, tower: int, trace: pathlib.Path, deadline: float | None = None) -> None:
        self._trace = trace
        self._tower = tower
        self._fault = None if trace.exists() else fault
        self._deadline = deadline
        self.step = 0

    def at(self, phase: str, step: int | None = None) -> None:
        """This tower has come to ``phase``, of :attr:`step` or another one that is given."""
        fault = self._fault
        if fault is None or phase != fault.phase or (self.step if step is None else step) != fault.step:
            return
        self._fault = None
        if fault.tower == self._tower:
            self._trace.touch()
        elif phase in _ALONE:  # else it cannot come there without the others
            wait_until(self._trace.exists)
        if self._deadline is not None:
            shorten_deadlines(self._deadline)
        if fault.action == "until cut":
            wait_until(self._trace.with_suffix(".cut").exists)
        elif fault.tower == self._tower:
            self._happens(fault)

    def _happens(self, fault: Fault) -> None:
        phase = fault.phase
        if fault.action == "raise":
            raise Injected(f"injected in {phase}")
        if fault.action == "stuck thread":
            threading.Thread(target=forever).start()
            raise Injected("injected beside a thread that does not end")
        if fault.action == "early exit":
            os._exit(0)
        if fault.action == "deadlock":  # a collective that no other tower makes
            mirrored.get_strategy().reduce("sum", 1)
        elif fault.action in ("until told", "hang"):  # StopSignals has then left the next signal to the system
            wait_until(lambda: signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
            self._trace.with_suffix(".told").touch()
            if fault.action == "hang":
                forever()
        elif fault.action == "disk full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        else:
            os.kill(os.getpid(), signal.Signals[fault.action])

    def watch_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        optimizer.register_step_pre_hook(lambda *_: self.at("before optimizer.step"))
        optimizer.register_step_post_hook(lambda *_: self.at("after optimizer.step"))

    def watch_all_reduce(self) -> None:
        """The fault happens after this tower has met the others in the averaging, and before it is done."""
        average, wait, inside = Regions.average, Barrier.wait, [False]

        def averaging(regions: Regions, queue: Any) -> Any:
            inside[0] = True
            try:
                return average(regions, queue)
            finally:
                inside[0] = False

        def waiting(barrier: Barrier) -> None:
            wait(barrier)
            if inside[0]:
                self.at("all-reduce")

        Regions.average = averaging  # type: ignore[method-assign]
        Barrier.wait = waiting  # type: ignore[method-assign]

    def watch_saving(self, checkpoints: mirrored.CheckpointManager, writes: bool) -> None:
        """On a tower that writes none, the phases of saving come when it has done its part of it."""
        if writes:
            return
        save = checkpoints.save

        def saving(*args: Any, **kwargs: Any) -> None:
            step = self.step
            save(*args, **kwargs)
            for number, phase in enumerate(SAVING):
                time.sleep(0.005 * number)
                self.at(phase, step)

        checkpoints.save = saving  # type: ignore[method-assign]


class WatchedDisk(Disk):
    """Tells an injector how far a checkpoint has come."""

    def __init__(self, injector: Injector) -> None:
        self._injector = injector
        self._step = -1  # that the checkpoint in hand was made after

    def mkdir(self, path: pathlib.Path) -> None:
        super().mkdir(path)
        if path.name.startswith(".saving-"):
            self._step = int(path.name.split("-")[2]) - 1

    def write(self, descriptor: int, data: memoryview) -> int:
        written = super().write(descriptor, data[: max(1, len(data) // 2)])
        self._injector.at("writing", self._step)
        return written

    def rename(self, old: pathlib.Path, new: pathlib.Path) -> None:
        checkpoint = old.name.startswith(".saving-")
        if checkpoint:
            self._injector.at("before rename", self._step)
        super().rename(old, new)
        if checkpoint:
            self._injector.at("after rename", self._step)
