"""The time of a tower's steps, by what it was spent on.

[Note: a partition of time] Each change of the tower's phase (``health.followers``) and each announced collective
(``health.callers``) is a stamp, and all time between two stamps belongs to one part. So the parts of a step add up to
the step, and nothing is measured twice. A stamp costs half a microsecond, and is read at a report.

[Note: what a batch was loaded for] shows when it is used: the time of loading counts where a training run comes next.
From the first run that evaluates to the next one that trains, no time counts.

[Note: stamps on a GPU] There a stamp is an event in the device's current stream, and no host waits for it before a
report. The time between two events is the device's. Where the host runs ahead, loading takes none of it; where the
device has to wait for a batch, the wait lies between the events around the loading.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mirrored.events import Events
from towers.health import status
from towers.health.status import Health
from towers.system import cuda
from towers.system.timeouts import clock

DATA, COMPUTE, COLLECTIVE, OPTIMIZER, OTHER = range(5)
"""The parts of a step. Time outside of all phases of a training step is the script's own."""

_PART_OF = {
    status.LOADING: DATA,
    status.IN_STEP: COMPUTE,
    status.BACKWARD: COMPUTE,
    status.AFTER_OPTIMIZER: COMPUTE,
    status.AVERAGING: COLLECTIVE,
    "synchronizing parameters": COLLECTIVE,
    status.OPTIMIZER: OPTIMIZER,
}
_STEP, _AWAY, _CALL = "the end of a step", "not counted", "a collective"
_FOLDED = 2048
"""Stamps after which those that are over are added up, so that memory does not grow with the steps of a report."""


class Timeline:
    """Stamps what this tower does, and adds it up by steps and parts.

    It holds no strategy, which may be dropped while listeners are left.

    Args:
        health, events: the strategy's, which tell it of phases, collectives and batches until :meth:`stop`.
        device: where the tower computes; see [Note: stamps on a GPU].

    Attributes:
        examples: of all towers, in the batches of training runs; the owner sets it back.
    """

    def __init__(self, health: Health, events: Events, device: torch.device) -> None:
        self._listeners: dict[Any, list[Any]] = {
            self.enter: health.followers,
            self._call: health.callers,
            self._load: events.loaded,
        }
        self._device = device
        self._on_device = device.type not in ("cpu", "mps", "tpu")  # which have events that tell the time
        self._phase = health.phase
        self._away = False
        self.examples = self._loaded = 0  # the second: of batches that no run has taken yet
        self._foreign: set[int] = set()  # threads that load ahead
        self._rows: list[list[float]] = []  # seconds by part, of each step that has ended
        self.restart()
        for listener, moment in self._listeners.items():
            moment.append(listener)

    def stop(self) -> None:
        """Follow the tower no longer."""
        while self._listeners:
            listener, moment = self._listeners.popitem()
            moment.remove(listener)

    # -- stamps ------------------------------------------------------------------------------------------

    def enter(self, phase: str) -> None:
        """The tower enters a phase."""
        thread = threading.get_ident()
        if phase == status.LOADING and thread != threading.main_thread().ident:
            self._foreign.add(thread)
        if thread in self._foreign:
            return
        if phase == status.IN_STEP:
            self.examples, self._loaded = self.examples + self._loaded, 0
        elif phase == status.IN_EVALUATION:
            self._loaded = 0
        self._phase = phase
        self._mark(phase)

    def _load(self, local: int, total: int) -> None:
        if not self._away:
            self._loaded += total

    def end_step(self) -> None:
        """A training step is over, and the next one begins."""
        self._mark(_STEP)

    @contextmanager
    def away(self) -> Iterator[None]:
        """Inside, the tower does something that belongs to no step."""
        self._mark(_AWAY)
        before, self._away = self._away, True
        try:
            yield
        finally:
            self._away = before
            self._mark(self._phase)

    def restart(self) -> None:
        """Forget all stamps: the next step begins now."""
        self._marks: list[tuple[str, Any]] = []  # names, and when: seconds, or events of a GPU
        self._last = self._now()
        self._part: int | None = _PART_OF.get(self._phase, OTHER)
        self._row, self._loading, self._evaluates = [0.0] * 5, 0.0, False
        self._rows.clear()
        self.examples = self._loaded = 0

    def _call(self, name: str) -> None:
        self._mark(_CALL if name else self._phase)

    def _mark(self, name: str) -> None:
        if self._away or cuda.is_capturing(self._device):
            return
        self._marks.append((name, self._now()))
        if len(self._marks) % _FOLDED == 0:
            self._fold(_FOLDED // 2)

    def _now(self) -> Any:
        if not self._on_device:
            return clock.monotonic()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    # -- sums --------------------------------------------------------------------------------------------

    def take(self) -> list[list[float]]:
        """The seconds by part of each step that has ended since the last call. It waits for a GPU."""
        if self._on_device and self._marks:
            self._marks[-1][1].synchronize()
        self._fold(len(self._marks))
        rows, self._rows = self._rows, []
        return rows

    def _fold(self, count: int) -> None:
        """Add up the first ``count`` stamps; none where the device has not reached them."""
        marks = self._marks[:count]
        if self._on_device and marks and not marks[-1][1].query():
            return
        del self._marks[:count]
        for name, stamp in marks:
            seconds = self._last.elapsed_time(stamp) / 1e3 if self._on_device else stamp - self._last
            self._last = stamp
            if self._part == DATA:
                self._loading += seconds
            elif self._part is not None and not self._evaluates:
                self._row[self._part] += seconds
            if name == _STEP:
                self._rows.append(self._row)
                self._row = [0.0] * 5
                continue
            if name == status.IN_STEP:
                self._row[DATA] += self._loading
            if name in (status.IN_STEP, status.IN_EVALUATION):
                self._evaluates, self._loading = name == status.IN_EVALUATION, 0.0
            self._part = None if name == _AWAY else COLLECTIVE if name == _CALL else _PART_OF.get(name, OTHER)
