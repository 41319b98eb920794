"""The steps of one model under a strategy, and the values that the towers combine after them.

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

from mirrored.context import in_step_of
from mirrored.keras import data
from mirrored.keras.keras_private import get_device as current_device
from mirrored.keras.loss_probe import probing
from mirrored.keras.metrics import Metrics
from mirrored.keras.patching import around
from mirrored.keras.statistics import StepVariables
from mirrored.keras.steps import Step, running
from mirrored.shares import Share
from mirrored.strategy.base import Strategy


class Training:
    """One model under a strategy."""

    def __init__(self, model: Any, strategy: Strategy) -> None:
        self._model = weakref.proxy(model)
        self.strategy = strategy
        self.several = strategy.num_replicas_in_sync > 1
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
