"""Checks calls of a strategy's methods, above all ``run``, and determines whether a run trains.

[Note: what trains on one tower] A run is a training step if an optimizer steps in it, or if it contains a backward. On
one tower, nothing is attached to the model that would report a backward. There, the gradients are compared before and
after a run. This is left out where gradients are off, and for kinds of runs in which an optimizer has stepped, so an
ordinary step of training or evaluation pays nothing.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from mirrored.context import current_frame
from mirrored.events import Events
from mirrored.shares import KnownShares
from mirrored.strategy.engine import Engine
from towers.collectives.communicator import Communicator
from towers.errors import ForkedError
from towers.health.status import Health
from towers.system.autograd_hooks import at_steps
from towers.system.tensors import Named
from towers.system.torch_private import version_of

_RUNS_LATER = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
"""Types that a function returns before its body has run."""


class CheckedCalls:
    """Methods that check the process, the thread and the context of a call, and the attributes that they use."""

    communicator: Communicator
    engine: Engine
    known_shares: KnownShares
    accumulates: bool
    _several: bool

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._runs_in: int | None = None  # the thread that is inside run

    def _begin_run(self) -> int | None:
        """Marks this thread as inside ``run``, and returns the value of :attr:`_runs_in` to restore after it.

        Raises:
            RuntimeError: another thread is inside ``run``.
        """
        outer, me = self._runs_in, threading.get_ident()
        if outer is not None and outer != me:
            raise RuntimeError(
                "strategy.run was called in a thread while another thread is inside it: the gradients of two steps "
                "would be averaged as one. A tower trains in one thread; others may load data. Train two models in "
                "turn, or start a program for each"
            )
        self._runs_in = me
        return outer

    def _check_here(self, call: str) -> None:
        """Checks that a call is allowed in this process and this context.

        Raises:
            ForkedError: in a process that was forked from a tower.
            RuntimeError: inside another strategy's scope or run.
        """
        if os.getpid() != self._pid:
            raise ForkedError(
                f"{call} was called in a process that was forked after the strategy was created and is not a "
                "tower. Use the strategy in the process that created it"
            )
        current = current_frame()
        here: object = current.strategy if current is not None else self
        if current is not None and here is not self:
            raise RuntimeError(
                f"{call} of one strategy inside the {'run' if current.replica else 'scope'} of another: strategies "
                "cannot be mixed"
            )


class RunKinds:
    """Reports to ``health`` whether a starting run trains. The last run of the same kind decides."""

    def __init__(self, events: Events, health: Health) -> None:
        self._only_evaluates: Callable[[], bool] = lambda: False
        self._health = health
        self._evaluates: dict[_Kind, bool] = {}
        self._runs: list[_Run] = []  # the current ones, which are nested
        self._alone = False
        self._stepping: set[_Kind] = set()  # kinds of runs that are reported to train, above all by optimizers
        self._parameters: list[weakref.ref[torch.Tensor]] = []
        events.begin_run.append(self._begin_run)
        events.end_run.append(self._end_run)
        events.failed.append(lambda error: self._runs.pop())

    def attach(self, engine: Engine, *, alone: bool) -> None:
        """Follows the models of an engine.

        Args:
            alone: whether nothing else reports backwards and steps; see [Note: what trains on one tower].
        """
        self._only_evaluates, self._alone = engine.recorder.only_evaluates, alone
        if alone:
            engine.events.mirrored.append(self._add)
            at_steps(self, RunKinds.note_step)

    def _begin_run(self, fn: Callable[..., Any]) -> None:
        self._runs.append(run := _Run((fn, False)))  # first, because a failure removes it
        computes_gradients = torch.is_grad_enabled()
        may_train = computes_gradients and not self._only_evaluates()
        run.kind = kind = getattr(fn, "__qualname__", type(fn)), may_train
        if self._alone and computes_gradients and kind not in self._stepping:
            run.gradients = self._gradients()
        self._health.begin_run(self._evaluates.get(kind, not may_train))

    def _end_run(self) -> None:
        run = self._runs.pop()
        if self._alone:
            reported = run.steps or self._health.trains
            stepping = run.kind in self._stepping  # such a run is assumed to train, even if no optimizer has stepped
            if not reported and (stepping or (run.gradients is not None and self._have_changed(run.gradients))):
                self._health.train()
            (self._stepping.add if reported else self._stepping.discard)(run.kind)
        self._health.end_run()
        self._evaluates[run.kind] = self._health.evaluates

    def _add(self, parameters: Iterable[Named]) -> None:
        living = [reference for reference in self._parameters if reference() is not None]
        self._parameters = living + [weakref.ref(named.tensor) for named in parameters]

    def _gradients(self) -> _Gradients:
        """Returns the gradients by parameter, with versions, which increase with each change of the values."""
        parameters = [parameter for reference in self._parameters if (parameter := reference()) is not None]
        gradients = [(id(p), p.grad) for p in parameters if p.grad is not None]
        return {key: (weakref.ref(gradient), version_of(gradient)) for key, gradient in gradients}

    def _have_changed(self, before: _Gradients) -> bool:
        for key, (gradient, version) in self._gradients().items():
            if key not in before or before[key][0]() is not gradient() or before[key][1] != version:
                return True
        return False

    def note_step(self, *_: Any) -> None:
        """Records that an optimizer steps."""
        if self._runs:
            self._runs[-1].steps = True
            if not self._health.trains:
                self._health.train()


_Kind = tuple[object, bool]
"""A function's name, and whether the run may train, since one function may do both.

In its first run, a function is assumed to evaluate if gradients are off, or if all models are in eval mode.
"""
_Gradients = dict[int, tuple["weakref.ref[torch.Tensor]", int]]


@dataclasses.dataclass
class _Run:
    """A call of ``run``.

    Attributes:
        gradients: those at its start, if they are compared at its end.
        steps: whether an optimizer has stepped in it.
    """

    kind: _Kind
    gradients: _Gradients | None = None
    steps: bool = False


def check_arguments(fn: object, args: object, kwargs: object) -> None:
    """Checks that ``strategy.run(fn, args, kwargs)`` means ``fn(*args, **kwargs)``.

    Raises:
        TypeError: ``fn`` is not a function, ``args`` is not a tuple or list, or ``kwargs`` is not a mapping.
    """
    sequence = isinstance(args, (tuple, list))
    if callable(fn) and sequence and (kwargs is None or isinstance(kwargs, Mapping)):
        return
    if not callable(fn):
        raise TypeError(
            f"strategy.run was given {_described(fn)} as the function to call; give it the function and its arguments: "
            "strategy.run(step, args=(x, y))"
        )
    name = getattr(fn, "__name__", "step").replace("<lambda>", "step")
    if sequence:
        wrong, right = f"{_described(kwargs)} as kwargs", "kwargs is a dict of the keyword arguments"
    else:
        wrong, right = f"{_described(args)} as args", "args is a tuple or list of the positional arguments"
    way = f"strategy.run({name}, args=(x, y))"
    if isinstance(args, Mapping):
        way = f"strategy.run({name}, args=(batch,)), or strategy.run({name}, kwargs=batch)"
    raise TypeError(f"strategy.run({name}, …) was given {wrong}, but {right}: {way}")


def refuse_what_runs_later(fn: object, result: Any) -> None:
    """Checks that the body of ``fn``, which has returned ``result``, has run.

    Raises:
        TypeError: ``result`` is a generator or a coroutine.
    """
    if not isinstance(result, _RUNS_LATER):
        return
    kind, way = "generator", "Write the step without yield, or return the generator's values as a list"
    if not isinstance(result, types.GeneratorType):
        kind, way = "async generator", "Write the step as a plain function, without async"
    if isinstance(result, types.CoroutineType):
        kind = "coroutine"
        result.close()  # otherwise, Python warns that it was never awaited
    name = getattr(fn, "__name__", type(fn).__name__)
    raise TypeError(
        f"the function {name} of strategy.run returned a {kind}. Its body would run after strategy.run has "
        f"returned, outside the replica context. {way}"
    )


def _described(value: object) -> str:
    shape = getattr(value, "shape", None)
    size = f" and shape {tuple(shape)}" if isinstance(shape, tuple) else ""
    return f"a value of type {type(value).__name__}{size}"
