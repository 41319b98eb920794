"""The moments of a training, and the listeners at each: the engine's features, profiler ranges, monitors.

[Note: listeners change nothing] Any number of listeners may be added to a moment. They do not depend on each other.
They are called in the order in which they were added: first the strategy's, then the engine's features in the order of
``Engine.__init__``, then the script's. A run on a stand-in adds one more listener of the engine, which restores running
statistics. An exception in a listener ends the step. Code that replaces something in a script is not a listener, but
belongs in the interceptor (:mod:`mirrored.interceptor`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from towers.health.status import Health
from towers.system.profiling import range_


class Moment(list[Callable[..., object]]):
    """The listeners of one moment. A call of the moment calls all listeners in order.

    A listener that another listener adds or removes takes effect from the next call.
    """

    def __call__(self, *what: Any) -> None:
        for listener in tuple(self):
            listener(*what)


class Events:
    """The listeners of one strategy, by moment. A training passes the moments in this order.

    On one tower, ``before_step``, ``after_step`` and the phases of backward, averaging and the optimizer do not occur,
    except those that virtual towers, local steps, watched gradients or central storage on an accelerator need.

    Attributes:
        recorded: ``()``: the modules that a scope has recorded, and that are not yet mirrored, have changed. It also
            occurs just before ``mirrored``.
        loaded: ``(local, total)``: a batch is loaded, with these numbers of examples on this tower and on all towers.
        begin_run: ``(fn)``: ``strategy.run`` is about to call ``fn``.
        mirrored: ``(parameters)`` are mirrored from now on. They are the same, in the same order, on all towers. It
            occurs within ``begin_run``; for a lazy module, in its first forward.
        phase: ``(name)``, one of :mod:`towers.health.status` or the script's own; "" is the script's own code. It is
            not a :class:`Moment`, but the plain list ``health.followers``, whose listeners ``Health.enter`` calls.
        before_step: ``(optimizer)`` of mirrored parameters is about to step.
        after_step: ``(optimizer)`` has stepped. Inside ``run``, this includes optimizers of parameters that no scope
            mirrored.
        end_run: ``()``: the function has returned.
        end_step: ``()``: a training step has ended, outside ``run``: at the end of a run that trains, in
            ``CheckpointManager.step()`` if the script calls it, or in Lightning after the steps of the optimizers.
        failed: ``(error)``: the function, or the code before it, has raised an exception.
        saving: ``(name)``: a checkpoint of this name is about to be taken.
        saved: ``(name)``: a checkpoint of this name was taken. It may not be on disk yet.
        check: ``(call)``: all towers must be compared now. ``call`` describes the operation in progress in messages.
    """

    def __init__(self, health: Health) -> None:
        self.recorded, self.mirrored, self.loaded = Moment(), Moment(), Moment()
        self.begin_run, self.end_run, self.failed = Moment(), Moment(), Moment()
        self.before_step, self.after_step = Moment(), Moment()
        self.end_step, self.check = Moment(), Moment()
        self.saving, self.saved = Moment(), Moment()
        self.phase = health.followers


def enclose_runs(events: Events, make: Callable[[], AbstractContextManager[Any]]) -> None:
    """Encloses each run in a context manager that ``make`` returns."""
    runs: list[AbstractContextManager[Any]] = []  # nested

    def begin_run(fn: Callable[..., Any]) -> None:
        runs.append(make())
        runs[-1].__enter__()

    def end_run(*_: Any) -> None:
        if runs:  # otherwise, the run was interrupted before it started
            runs.pop().__exit__(None, None, None)

    events.begin_run.append(begin_run)
    events.end_run.append(end_run)
    events.failed.append(end_run)


def show_in_traces(events: Events) -> None:
    """Makes runs and optimizers' steps ranges in the trace of a running profiler."""
    step = ExitStack()

    def begin_step(optimizer: Any) -> None:
        step.close()  # the range of a step that raised, or within which another optimizer steps
        step.enter_context(range_("mirrored::optimizer-step"))

    enclose_runs(events, lambda: range_("mirrored::run"))
    events.before_step.append(begin_step)
    events.after_step.append(lambda optimizer: step.close())
