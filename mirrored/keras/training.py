"""The steps of one model under a strategy, and the values that the towers combine after them.

Variables that a step changes without a gradient, such as moving statistics, are combined by their ``aggregation``.
``"mean"`` is the mean over the examples of the step, and so is ``"none"``, which Keras' own layers use. ``"sum"`` adds
up the changes of the towers. ``"only_first_replica"`` is tower 0's value. Integers with ``"none"``, such as the states
of seed generators and counters, are equal on every tower.

[Note: the tower's device] Keras has one default device per process: a GPU if there is one. If the tower has a device of
the same kind, Keras uses it, because a strategy makes its device the current one. Otherwise (CPU towers on a machine
with GPUs, a device that Keras does not support), Keras' device is set in the strategy's scope and in ``fit`` and the
other methods.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import torch
from torch import Tensor

from mirrored.context import in_step_of
from mirrored.keras import data
from mirrored.keras.computations import takes_global_statistics
from mirrored.keras.keras_private import around, variables_of_trained_layers
from mirrored.keras.keras_private import get_device as current_device
from mirrored.keras.metrics import Metrics
from mirrored.keras.probes import probing
from mirrored.keras.steps import Step, running
from mirrored.shares import Share
from mirrored.strategy.base import Strategy
from towers.collectives.communicator import Communicator
from towers.collectives.values import all_reduce_together


class StepVariables:
    """The variables of one model that a step may change.

    Args:
        model: the model. Its layers may change at any time.
    """

    def __init__(self, model: Any, comm: Communicator) -> None:
        self._model = model
        self._comm = comm
        self._changing: list[Any] | None = None
        self._before: list[tuple[Any, Tensor]] = []

    def look(self) -> None:
        """Starts a loop: the model may have other layers, or other frozen layers."""
        self._changing = None

    def begin(self) -> None:
        """Starts a step."""
        if self._changing is None:
            self._changing = list(self._find())
        self._before = [(v, v.value.clone()) for v in self._changing if v.aggregation == "sum"]

    @torch.no_grad()
    def combine(self, step: Step) -> None:
        """Ends a step, and gives all towers the same values. All towers must call it."""
        contributions: list[tuple[Tensor, Tensor]] = []
        added = {id(variable): before for variable, before in self._before}
        for variable in self._changing or []:
            value = variable.value.detach()
            if (before := added.get(id(variable))) is not None:
                contribution = value - before if step.share.local else torch.zeros_like(value)
            elif variable.aggregation == "only_first_replica":
                contribution = value if self._comm.index == 0 else torch.zeros_like(value)
            elif value.is_floating_point():
                contribution = value * step.fraction
            else:
                continue
            contributions.append((value, contribution))
        with self._comm.health.at("the moving statistics of a Keras model"):
            totals = all_reduce_together(self._comm, "sum", [contribution for _, contribution in contributions])
        for (value, _), total in zip(contributions, totals, strict=True):
            value.copy_(total)
        for variable, before in self._before:
            variable.value.add_(before)

    def _find(self) -> Iterator[Any]:
        """Yields the variables that layers may change. Those of frozen layers do not change."""
        for layer, variable in variables_of_trained_layers(self._model):
            combined = variable.aggregation != "none" or keras.backend.is_float_dtype(variable.dtype)
            if combined and not takes_global_statistics(layer):
                yield variable


class Training:
    """One model under a strategy.

    Attributes:
        several: whether there are several towers.
        defers: whether the logs of a step are complete only after :meth:`reduce`.
        waits: whether a step of this process waits until it is complete (``train_on_batch``).
    """

    def __init__(self, model: Any, strategy: Strategy) -> None:
        self._model = weakref.proxy(model)
        self.strategy = strategy
        self.several = self.defers = strategy.num_replicas_in_sync > 1
        self.waits = False
        self.metrics = Metrics(self._model, strategy.communicator)
        self._variables = StepVariables(self._model, strategy.communicator)
        self._loop = data.Loop(strategy)
        self._newest: tuple[dict[str, Any], Step] | None = None
        self._probed = False  # whether the model's own losses have passed their test
        self.newest_share: Share | None = None  # of the last batch for training or testing
        self.is_read: Callable[[], bool] = lambda: False  # whether a monitor reads the logs of this batch

    @contextlib.contextmanager
    def loop(self, reads_every: int) -> Iterator[None]:
        """Reads and runs batches inside the context."""
        before, outer = self._loop, data.running
        self._loop = data.running = data.Loop(self.strategy, reads_every)
        self._variables.look()
        try:
            with _on_device_of(self.strategy):
                yield
        finally:
            self._loop, data.running = before, outer

    def run(self, function: Callable[[Any], Any], batch: Any, trains: bool) -> tuple[Any, Step]:
        """Runs a step on this tower's share of a batch. Returns the result of ``function`` and the step."""
        batch, share = data.share_of(self.strategy, batch)
        step = Step(self.strategy, share, combines=self.metrics.have)
        self.metrics.begin()
        kept = [] if share.local else self.metrics.state()
        if trains:
            self._variables.begin()
        with running(step), contextlib.ExitStack() as stack:
            probes = trains and not self._probed and stack.enter_context(probing(self._model, batch))
            with in_step_of(f"the {'train' if trains else 'test'}_step of a Keras model"):
                result = self.strategy.run(function, args=([batch],))
        self._probed = self._probed or probes
        for tensor, value in kept:
            tensor.copy_(value)
        self.metrics.count(share)
        if trains:
            self._variables.combine(step)
        return result, step

    def step(self, function: Callable[[Any], Any], batch: Any, trains: bool) -> Any:
        """Returns the logs of a training or test step: those of all towers if they are read now, or the last ones."""
        logs, step = self.run(function, batch, trains)
        if not isinstance(logs, dict):
            return logs
        self.newest_share = step.share
        loop = self._loop
        loop.steps += 1
        self._newest = logs, step
        regular = loop.reads_every and (loop.steps % loop.reads_every == 0 or not loop.logs)
        if regular or (trains and self.is_read()):
            self.reduce()
        return loop.logs or logs

    def forget(self) -> None:
        """Forgets the counts of metrics, after their reset."""
        self.metrics.forget()

    def reduce(self) -> dict[str, Any]:
        """Returns the newest logs of all towers; see :meth:`Metrics.reduce`."""
        if self._newest is None:
            return {}
        (logs, step), self._newest = self._newest, None
        self._loop.logs = self.metrics.reduce(logs, step)
        return self._loop.logs


def _on_device_of(strategy: Strategy) -> contextlib.AbstractContextManager[Any]:
    """Makes Keras create its tensors on a strategy's device; see [Note: the tower's device]."""
    if str(current_device()).partition(":")[0] == strategy.device.type:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = keras.device(str(strategy.device))
    return context


@around(Strategy, "scope")
@contextlib.contextmanager
def _scope(original: Any, strategy: Strategy, **settings: Any) -> Iterator[Strategy]:
    with original(strategy, **settings), _on_device_of(strategy):
        yield strategy
