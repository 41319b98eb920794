"""``fit`` with parameter servers: the chief runs Keras' loop, workers run its training steps, servers its optimizer.

The chief reads the batches, and schedules a ``train_step`` for each. A few more are scheduled than there are workers,
so callbacks that follow batches see the logs of finished batches. The epoch ends when all of its batches have finished.
Each worker returns its batch's contributions to the metrics, and the chief adds them up. The chief evaluates and
predicts.

[Note: pickles of Keras' objects] Keras pickles a model as a file, whose reader makes new variables. Here, models,
metrics and losses are pickled with their attributes, so references to variables stay references
(:mod:`mirrored.parameter_server.servers`). The values of ``compile`` are sent at each ``fit``, because they may have
changed.

[Note: Keras' optimizers on servers] The servers step as towers do with a sharded optimizer
(:mod:`mirrored.keras.divided_steps`), except for two things. A worker scales and clips its gradients, as those of
TensorFlow do. Numbers that belong to no parameter, such as the iterations, are part of the state of all parameters.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import torch
from torch import Tensor, nn

from mirrored.context import in_step_of
from mirrored.data.distribute import InputContext
from mirrored.keras import data, keras_private
from mirrored.keras.divided_steps import DividedStep, class_for, class_named
from mirrored.keras.keras_private import around
from mirrored.keras.metrics import check, results, variables_of_metrics
from mirrored.keras.training import Training
from mirrored.parameter_server.coordinator import ClusterCoordinator, ShortQueue
from mirrored.parameter_server.servers import ServedOptimizer, libraries
from mirrored.parameter_server.strategy import ParameterServerStrategy, PerWorkerDataset


class ServedStep(DividedStep, ServedOptimizer):
    """A Keras optimizer that servers step; see [Note: Keras' optimizers on servers].

    Attributes:
        own: on the chief: a copy to be sent, without variables. On a worker: that copy, whose ``apply`` pushes. On a
            server: the optimizer of its parts.
    """

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self.own = keras_private.copy_of_optimizer(optimizer)
        self.param_groups[0]["iterations_before"] = 0
        self.update_settings()

    def _add_slots(self, optimizer: Any) -> None:
        self.slots += [(0, name, number) for name, number in keras_private.numbers_of(optimizer).items()]

    def __reduce__(self) -> tuple[Any, ...]:
        return _blank, (type(self).__name__, type(self).elementwise), self.__getstate__()

    def __getstate__(self) -> dict[str, Any]:
        sent = {name: vars(self)[name] for name in ("own", "_described", "_dtype")}
        return {**super().__getstate__(), **sent, "slots": [], "_optimizer": _nothing}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _pushing[self.own] = self

    # -- on the chief ------------------------------------------------------------------------------------

    def update_settings(self) -> None:
        if (optimizer := self._optimizer()) is not None:
            self.param_groups[0]["settings"] = keras_private.settings_of(optimizer)

    def take_written(self) -> bool:
        if written := super().take_written():
            first, *others = self.of_model
            optimizer = self._optimizer()
            numbers = {name: self.state[first][name] for name in keras_private.numbers_of(optimizer)}
            for parameter in others:
                self.state[parameter] |= numbers
        return written

    # -- on a worker -------------------------------------------------------------------------------------

    def note_steps(self, steps: int) -> None:
        group = self.param_groups[0]
        keras_private.set_settings(self.own, group["settings"])
        keras_private.numbers_of(self.own)["_iterations"].assign(group["iterations_before"] + steps)

    def push(self, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """Pushes gradients of variables of the model."""
        pairs = [pair for pair in zip(gradients, variables, strict=True) if pair[0] is not None]
        clipped = keras_private.clipped(self.own, [gradient for gradient, _ in pairs])
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None
        for gradient, (_, variable) in zip(clipped, pairs, strict=True):
            variable.value.grad = gradient
        self.step()

    # -- on a server -------------------------------------------------------------------------------------

    def take_parts(self, owners: Sequence[int], parts: Sequence[Tensor]) -> None:
        self.divide(owners, parts, torch.device("cpu"), self.own)
        for variable, place in zip(self._variables, owners, strict=True):
            variable.constraint = self._described[place].constraint

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Steps a server's parts. On workers, the strategy replaces it."""
        own = self.own
        keras_private.set_settings(own, self.param_groups[0]["settings"])
        own.clipnorm = own.global_clipnorm = own.clipvalue = own.loss_scale_factor = None
        if self._parameters:
            for name, number in keras_private.numbers_of(own).items():
                memory = self.state[self._parameters[0]][name]
                keras_private.set_memory(number, memory)
                for parameter in self._parameters:
                    self.state[parameter][name] = memory
        gradients, variables = self._used()
        keras_private.step(own, gradients, variables)


def _blank(name: str, elementwise: bool) -> ServedStep:
    blank: ServedStep = object.__new__(class_named(name, elementwise, ServedStep))
    return blank


def _nothing() -> None:
    return None


_pushing: weakref.WeakKeyDictionary[Any, ServedStep] = weakref.WeakKeyDictionary()
"""Of a Keras optimizer on a worker: the step that pushes."""


@around(keras.optimizers.Optimizer, "apply")
def _apply(original: Any, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
    if (step := _pushing.get(optimizer)) is None:
        return original(optimizer, grads, trainable_variables)
    if trainable_variables is None:
        raise ValueError("on a worker of parameter servers, optimizer.apply needs the variables of the gradients")
    return step.push(list(grads), list(trainable_variables))


def step_of(optimizer: Any) -> ServedStep:
    """Returns the torch optimizer that steps for a Keras optimizer with variables, on the chief.

    Raises:
        TypeError: servers cannot step it.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise TypeError(
            "parameter servers cannot step a LossScaleOptimizer (mixed_float16): its scale depends on the gradients of "
            "all workers. Use mixed_bfloat16, which needs no scale"
        )
    step: ServedStep | None = keras_private.attached(optimizer, "step")
    if step is None:
        step = class_for(optimizer, ServedStep)(optimizer)
        keras_private.attach(optimizer, "step", step)
        step.take_written()
        step.param_groups[0]["iterations_before"] = int(step.state[step.of_model[0]]["_iterations"])
    return step


# -- the interface for the strategy ----------------------------------------------------------------------


class _Keras:
    """Implements :class:`mirrored.parameter_server.servers.Library`."""

    def reduce(self, obj: Any) -> Any:
        return keras_private.reduce_with_attributes(obj)

    def optimizer_of(self, obj: Any) -> ServedOptimizer | None:
        return step_of(obj) if isinstance(obj, keras.optimizers.Optimizer) and obj.built else None

    def written_by_forward(self, model: nn.Module) -> Iterable[Tensor]:
        layers = [layer for layer in model.modules() if isinstance(layer, keras.Layer)]
        for layer in layers:
            keras_private.register_variables(layer)
        return [variable.value for layer in layers for variable in keras_private.written_by(layer)]

    def watch(self, layers: Iterable[nn.Module], refresh: Callable[[], None]) -> None:
        method: Any = weakref.WeakMethod(refresh)  # its object holds the layers
        _refreshed.update((layer, method) for layer in layers if isinstance(layer, keras.Layer))
        _refresh_in_calls()


_refreshed: weakref.WeakKeyDictionary[Any, weakref.WeakMethod[Any]] = weakref.WeakKeyDictionary()


@functools.cache
def _refresh_in_calls() -> None:
    """Patches the calls of Keras' layers, which run no hooks of torch."""

    @around(keras.Layer, "__call__")
    def call(original: Any, layer: Any, *args: Any, **kwargs: Any) -> Any:
        method = _refreshed.get(layer)
        if method is not None and (refresh := method()) is not None:
            refresh()
        return original(layer, *args, **kwargs)


libraries.append(_Keras())


# -- training --------------------------------------------------------------------------------------------


Returned = tuple[list[str], dict[str, float], list[Tensor], int]
"""The result of a training step: the names of its logs, the logs that no metric has computed, the batch's contribution
to each metric variable, and the number of examples.
"""


class _Trainee:
    """A model on a worker.

    Args:
        compiled: the attributes that ``compile`` has set.
        make_data: creates the worker's own data; None if the chief sends batches.
    """

    def __init__(
        self, model: Any, compiled: dict[str, Any], make_data: Callable[[Any], Any] | None, context: InputContext
    ) -> None:
        vars(model).update(compiled)
        self._model = model
        self._batches = iter(make_data(context)) if make_data is not None else None

    def train(self, batch: Any) -> Returned:
        """Runs a training step.

        Raises:
            StopIteration: the worker's own data have ended.
        """
        model = self._model
        if self._batches is not None:
            batch = keras.tree.map_structure(_as_tensor, next(self._batches))
        variables = variables_of_metrics(model)
        for metric in model.metrics:
            metric.reset_state()
        before = [variable.value.detach().clone() for variable in variables]
        with in_step_of("the train_step of a Keras model"):
            logs = model.train_step(batch)
        own = results(model)
        others = {name: float(value) for name, value in logs.items() if name not in own}
        adds = [
            variable.value.detach() - start if variable.aggregation == "sum" else variable.value.detach()
            for variable, start in zip(variables, before, strict=True)
        ]
        examples = next(len(leaf) for leaf in keras.tree.flatten(batch) if hasattr(leaf, "shape"))
        return list(logs), others, adds, examples


def _as_tensor(leaf: Any) -> Any:
    return torch.as_tensor(leaf) if isinstance(leaf, np.ndarray) else leaf


def _train(trainee: Any, batch: Any) -> Any:
    return trainee.train(batch)


class ServedTraining(Training):
    """A model under a :class:`mirrored.ParameterServerStrategy`, on the chief."""

    strategy: ParameterServerStrategy

    def __init__(self, model: Any, strategy: ParameterServerStrategy) -> None:
        super().__init__(model, strategy)
        self.defers = True
        self._itself = weakref.ref(model)
        self._queue: ShortQueue | None = None
        self._trainee: PerWorkerDataset | None = None
        self._loops = 0
        self._examples = 0  # of the epoch
        self._names: list[str] = []
        self._others: dict[str, float] = {}

    @contextlib.contextmanager
    def loop(self, reads_every: int) -> Iterator[None]:
        self._loops += 1
        try:
            with super().loop(reads_every):
                yield
        finally:
            self._loops -= 1
            if not self._loops:  # evaluate may run in a loop of fit
                self._queue = self._trainee = None

    def step(self, function: Callable[[Any], Any], batch: Any, trains: bool) -> Any:
        """Schedules a training step. Returns the newest logs, which may be those of earlier batches."""
        queue = self._queue or self._begin()
        if (step := step_of(self._model.optimizer)).take_written():
            self._send_state(step)
        data_of_worker = isinstance(batch, data.OfWorker)
        self._add(queue.schedule(_train, (self._trainee, None if data_of_worker else batch)))
        loop = self._loop
        loop.steps += 1
        if self.waits:
            return self.reduce()
        return self._read() if loop.reads_every and loop.steps % loop.reads_every == 0 else loop.logs

    def reduce(self) -> dict[str, Any]:
        """Waits for all steps, and returns their logs."""
        if self._queue is None:
            return {}
        self._add(self._queue.finish())
        return self._read()

    def forget(self) -> None:
        self._examples, self._names = 0, []

    def _begin(self) -> ShortQueue:
        model, strategy = self._model, self.strategy
        optimizer = keras_private.built(model)
        coordinator = strategy.coordinator() or ClusterCoordinator(strategy)
        for metric in model.metrics:
            check(metric)
        if (step := step_of(optimizer)).take_written():
            self._send_state(step)
        make_data = data.running.make_data if data.running is not None else None
        compiled = keras_private.compiled(model)
        trainee = functools.partial(_Trainee, self._itself(), compiled, make_data)
        self._trainee = coordinator.create_per_worker_dataset(trainee)
        for variable in model.trainable_variables:
            if variable.constraint is not None and len(strategy.replica.parts_of(variable.value)) > 1:
                raise ValueError(
                    f"{variable.path} has a constraint, which needs the whole variable, but variable_partitioner "
                    "splits it: let the partitioner return 1 for it"
                )
        self._queue = ShortQueue(coordinator)
        return self._queue

    def _send_state(self, step: ServedStep) -> None:
        written = int(step.state[step.of_model[0]]["_iterations"])
        if self.strategy.send_state(step):
            written -= self.strategy.replica.steps_of(step)
        step.param_groups[0]["iterations_before"] = written

    @torch.no_grad()
    def _add(self, returned: Iterator[Returned]) -> None:
        """Adds the contributions of batches to the metrics."""
        try:
            for self._names, self._others, adds, examples in returned:
                self._examples += examples
                for variable, value in zip(variables_of_metrics(self._model), adds, strict=True):
                    if variable.aggregation == "sum":
                        variable.value.add_(value)
                    elif variable.aggregation == "mean":
                        variable.value.lerp_(value.to(variable.value.dtype), examples / self._examples)
                    else:
                        variable.value.copy_(value)
        except BaseException as error:
            if error.__cause__ is not None:  # the worker's traceback, which Keras would remove
                error.add_note(str(error.__cause__))
            raise

    def _read(self) -> dict[str, Any]:
        own = results(self._model)
        if self._names:
            self._loop.logs = {name: own.get(name, self._others.get(name)) for name in self._names}
        return self._loop.logs
