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
from mirrored.checkpoint.disk import Disk
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


class Injected(RuntimeError):
    """The fault that was asked for."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """What is to happen, once.

    Attributes:
        action: one of :data:`ACTIONS`, :data:`DEATHS`, "slow" (a second of sleep), "hang" (a minute) or "disk full".
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
        trace: a file that is made when it does.

    Attributes:
        step: the step that is under way.
    """

    def __init__(self, fault: Fault | None, tower: int, trace: pathlib.Path | None = None) -> None:
        self._trace = trace
        self._fault = fault if fault is not None and fault.tower == tower else None
        self.step = 0

    def at(self, phase: str, step: int | None = None) -> None:
        """This tower has come to ``phase``, of :attr:`step` or another one that is given."""
        fault = self._fault
        if fault is None or phase != fault.phase or (self.step if step is None else step) != fault.step:
            return
        self._fault = None
        if self._trace is not None:
            if self._trace.exists():  # this is a run that goes on
                return
            self._trace.touch()
        if fault.action == "raise":
            raise Injected(f"injected in {phase}")
        if fault.action == "stuck thread":
            threading.Thread(target=time.sleep, args=(60,)).start()
            raise Injected("injected beside a thread that does not end")
        if fault.action == "early exit":
            os._exit(0)
        if fault.action == "deadlock":  # a collective that no other tower makes
            mirrored.get_strategy().reduce("sum", 1)
        elif fault.action in ("slow", "hang"):
            time.sleep(1.0 if fault.action == "slow" else 60.0)
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
