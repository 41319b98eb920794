"""The moments of a training, and what is called at each: the engine's features, profiler ranges, monitors.

[Note: listeners change nothing] Any number of listeners may be added to a moment, and none of them knows of another.
They are called in the order in which they were added: those of the strategy first, then the engine's features in the
order of ``Engine.__init__``, then the script's; in a run on a stand-in one more of the engine's, which puts running
statistics back. What one raises ends the step. What replaces something in a script is no listener but the interceptor
(:mod:`mirrored.interceptor`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from towers.health.status import Health
from towers.system.profiling import range_


class Moment(list[Callable[..., object]]):
    """The listeners of one moment; a call tells all of them, in their order.

    A listener that is added or removed by another one is so from the next call on.
    """

    def __call__(self, *what: Any) -> None:
        for listener in tuple(self):
            listener(*what)


class Events:
    """The listeners of one strategy, by moment. A training goes through the moments in this order.

    At one tower ``recorded``, ``mirrored``, ``before_step``, ``after_step`` and the phases of backward, averaging and
    the optimizer are missing, but for those that virtual towers, local steps or watched gradients need.

    Attributes:
        recorded: ``()``: what a scope has recorded and is not mirrored yet has changed; again just before ``mirrored``.
        loaded: ``(local, total)``: a batch is there, with so many examples on this tower and on all towers.
        begin_run: ``(fn)`` is about to be called by ``strategy.run``.
        mirrored: ``(parameters)`` are mirrored from now on, the same ones in the same order on all towers. It comes
            within ``begin_run``; for a lazy module, in its first forward.
        phase: ``(name)``, one of :mod:`towers.health.status` or the script's own; "" is the script's own code. No
            :class:`Moment` but the plain list ``health.followers``, whose listeners ``Health.enter`` calls.
        before_step: ``(optimizer)`` of mirrored parameters is about to step.
        after_step: ``(optimizer)`` has stepped; inside ``run`` also one of parameters that no scope mirrored.
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


def show_in_traces(events: Events) -> None:
    """Let runs and optimizers' steps be ranges in the trace of a running profiler."""
    runs: list[AbstractContextManager[Any]] = []  # one within the other
    step = ExitStack()

    def begin_run(fn: Callable[..., Any]) -> None:
        runs.append(range_("mirrored::run"))
        runs[-1].__enter__()

    def end_run(*_: Any) -> None:
        if runs:  # else the run was interrupted before it began
            runs.pop().__exit__(None, None, None)

    def begin_step(optimizer: Any) -> None:
        step.close()  # of a step that raised, or within which another optimizer steps
        step.enter_context(range_("mirrored::optimizer-step"))

    events.begin_run.append(begin_run)
    events.before_step.append(begin_step)
    events.after_step.append(lambda optimizer: step.close())
    events.end_run.append(end_run)
    events.failed.append(end_run)
