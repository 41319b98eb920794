"""The time of a tower's steps, by parts.

[Note: a partition of time] Each change of the tower's phase (``health.followers``) and each announced collective
(``health.callers``) is a stamp. All time between two stamps belongs to one part. The parts of a step therefore add up
to the step, and no time is measured twice. A stamp costs half a microsecond, and is read at a report.

[Note: what a batch was loaded for] The use of a batch determines whether its loading time counts: it counts if a
training run follows. From the first run that evaluates to the next run that trains, no time counts. Only the end of a
run shows whether it has trained. If it has not, its time and examples are subtracted again.

[Note: stamps on a GPU] On a GPU, a stamp is an event in the device's current stream, and the host does not wait for it
before a report. The time between two events is the device's. If the host runs ahead, loading takes no device time. If
the device must wait for a batch, the wait is between the events around the loading.
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
from towers.system import accelerator
from towers.system.timeouts import clock

DATA, COMPUTE, COLLECTIVE, OPTIMIZER, OTHER = range(5)
"""The parts of a step. Time outside all phases of a training step is the script's own."""

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
_EVALUATED = "the end of a run that seemed to train"
_FOLDED = 2048
"""The number of stamps after which past ones are summed up, so that memory does not grow with the steps of a report."""


class Timeline:
    """Timestamps the phases of this tower, and sums up the time by steps and parts.

    It holds no strategy, which may be deleted while listeners remain.

    Args:
        health, events: the strategy's. They report phases, collectives and batches until :meth:`stop`.
        device: the tower's device; see [Note: stamps on a GPU].

    Attributes:
        examples: the number of examples of all towers, in the batches of training runs. The owner resets it.
    """

    def __init__(self, health: Health, events: Events, device: torch.device) -> None:
        self._listeners: dict[Any, list[Any]] = {
            self.enter: health.followers,
            self._call: health.callers,
            self._load: events.loaded,
            self._end_run: events.end_run,
        }
        self._device = device
        self._phase = health.phase
        self._away = False
        self._health = health
        self.examples = self._loaded = self._in_run = 0  # the others: in batches that no run, or the last one, has used
        self._foreign: set[int] = set()  # threads that load in advance
        self._rows: list[list[float]] = []  # seconds by part, of each step that has ended
        self.restart()
        for listener, moment in self._listeners.items():
            moment.append(listener)

    def stop(self) -> None:
        """Stops following the tower."""
        while self._listeners:
            listener, moment = self._listeners.popitem()
            moment.remove(listener)

    # -- stamps ------------------------------------------------------------------------------------------

    def enter(self, phase: str) -> None:
        """Records that the tower enters a phase."""
        thread = threading.get_ident()
        if phase == status.LOADING and thread != threading.main_thread().ident:
            self._foreign.add(thread)
        if thread in self._foreign:
            return
        if phase == status.IN_STEP:
            self._in_run += self._loaded
            self.examples, self._loaded = self.examples + self._loaded, 0
        elif phase == status.IN_EVALUATION:
            self._loaded = 0
        self._phase = phase
        self._mark(phase)

    def _end_run(self) -> None:
        if self._health.evaluates and not self._away:
            self.examples -= self._in_run
            self._mark(_EVALUATED)
        self._in_run = 0

    def _load(self, local: int, total: int) -> None:
        if not self._away:
            self._loaded += total

    def end_step(self) -> None:
        """Records that a training step ends and the next one starts."""
        self._mark(_STEP)

    @contextmanager
    def away(self) -> Iterator[None]:
        """Excludes the time inside the context from steps."""
        self._mark(_AWAY)
        before, self._away = self._away, True
        try:
            yield
        finally:
            self._away = before
            self._mark(self._phase)

    def restart(self) -> None:
        """Discards all stamps, so that the next step starts now."""
        self._marks: list[tuple[str, Any]] = []  # names and times: seconds, or events of a GPU
        self._last = self._now()
        self._part: int | None = _PART_OF.get(self._phase, OTHER)
        self._row, self._loading, self._evaluates = [0.0] * 5, 0.0, False
        self._before_run, self._outside = self._row, True  # the row at the start of the last run; whether it has ended
        self._rows.clear()
        self.examples = self._loaded = self._in_run = 0

    def _call(self, name: str) -> None:
        self._mark(_CALL if name else self._phase)

    def _mark(self, name: str) -> None:
        if self._away or accelerator.is_capturing(self._device):
            return
        self._marks.append((name, self._now()))
        if len(self._marks) % _FOLDED == 0:
            self._fold(_FOLDED // 2)

    @property
    def _on_device(self) -> bool:
        return self._device.type not in ("cpu", "mps", "tpu")  # the others have events with times

    def _now(self) -> Any:
        if not self._on_device:
            return clock.monotonic()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event

    # -- sums --------------------------------------------------------------------------------------------

    def take(self) -> list[list[float]]:
        """Returns the seconds by part of each step that has ended since the last call. It waits for a GPU."""
        if self._on_device and self._marks:
            self._marks[-1][1].synchronize()
        self._fold(len(self._marks))
        rows, self._rows = self._rows, []
        return rows

    def _fold(self, count: int) -> None:
        """Sums up the first ``count`` stamps, or none if the device has not reached them."""
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
            if name == _EVALUATED:
                if not self._evaluates:
                    self._row, self._evaluates = self._before_run, True
                continue
            if name == status.IN_STEP:
                if self._outside:
                    self._before_run = list(self._row)
                self._row[DATA] += self._loading
            if name in (status.IN_STEP, status.IN_EVALUATION):
                self._evaluates, self._loading, self._outside = name == status.IN_EVALUATION, 0.0, False
            elif not name:
                self._outside = True
            self._part = None if name == _AWAY else COLLECTIVE if name == _CALL else _PART_OF.get(name, OTHER)
