"""The moments of a training, and what is called at each: the engine's features, profiler ranges, monitors.

[Note: listeners change nothing] Any number of listeners may be added to a moment, and none of them knows of another.
They are called in the order in which they were added: those of the strategy first, then the engine's features in the
order of ``Engine.__init__``, then the script's. What one raises ends the step. What replaces something in a script is
no listener but the interceptor (:mod:`mirrored.interceptor`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from towers.health.status import Health
from towers.system.profiling import begin_range, end_range


class Moment(list[Callable[..., object]]):
    """The listeners of one moment; a call tells all of them, in their order."""

    def __call__(self, *what: Any) -> None:
        for listener in self:
            listener(*what)


class Events:
    """The listeners of one strategy, by moment. A training goes through the moments in this order.

    Attributes:
        recorded: ``()``: what a scope has recorded and is not mirrored yet has changed.
        mirrored: ``(parameters)`` are mirrored from now on, the same ones in the same order on all towers.
        loaded: ``(local, total)``: a batch is there, with so many examples on this tower and on all towers.
        begin_run: ``(fn)`` is about to be called by ``strategy.run``.
        phase: ``(phase)``: the tower enters a phase, one of :mod:`towers.health.status` (its function, backward,
            averaging gradients, the optimizer's step, loading data) or one of the script's; empty: it leaves the last.
        before_step: ``(optimizer)`` of mirrored parameters is about to step. (At one tower nothing looks for that.)
        after_step: ``(optimizer)`` has stepped.
        end_run: ``()``: the function has returned.
        failed: ``(error)``: the function, or what came before it, has ended in an exception.
        saved: ``(name)``: a checkpoint of this name has been taken; it may still be on its way to the disk.
        check: ``(call)``: see now that all towers hold the same, for what a person would say is being done.
    """

    def __init__(self, health: Health) -> None:
        self.recorded, self.mirrored, self.loaded = Moment(), Moment(), Moment()
        self.begin_run, self.end_run, self.failed = Moment(), Moment(), Moment()
        self.before_step, self.after_step = Moment(), Moment()
        self.saved, self.check = Moment(), Moment()
        self.phase = health.followers


class Ranges:
    """The ranges ``mirrored::run`` and ``mirrored::optimizer-step`` in the trace of a running profiler."""

    def __init__(self, events: Events) -> None:
        self._runs: list[Any] = []  # one within the other
        self._step: Any = None
        events.begin_run.append(lambda fn: self._runs.append(begin_range("mirrored::run")))
        events.before_step.append(self._begin_step)
        events.after_step.append(self._end_step)
        events.end_run.append(lambda: end_range(self._runs.pop()))
        events.failed.append(lambda error: end_range(self._runs.pop()))

    def _begin_step(self, optimizer: Optimizer) -> None:
        self._step = begin_range("mirrored::optimizer-step")

    def _end_step(self, optimizer: Optimizer) -> None:
        ended, self._step = self._step, None
        end_range(ended)
