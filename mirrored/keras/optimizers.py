"""Steps of Keras' optimizers under a strategy, also with state that is sharded over the towers.

[Note: a step of torch's around Keras'] Keras' optimizers are not torch optimizers, so torch's hooks do not report their
steps. So in ``strategy.run``, a Keras optimizer applies gradients within the step of a torch optimizer of the same
parameters. This step triggers the guard of unaveraged gradients, the mirror check (also of optimizer state), the
failure report, the profiler's ranges and ``mirrored verify``.

[Note: sharded steps of Keras] With ``shard_optimizer=True`` and in central storage, that torch optimizer is sharded
(:mod:`towers.sharding.optimizer`). Its inner one has a Keras optimizer of the same class and settings, whose variables
are this tower's shards. Everything that updates each element independently happens there: weight decay, accumulation
of gradients, moving averages of weights, the step. Two things need whole parameters: clipping by norms, for which the
towers add up the squares of their shards, and constraints, which every tower applies after the step. The variables of
the script's optimizer have no memory. If one is read, all of them receive the values of all towers until the next step.
If one is written to, as by ``load_weights``, all towers take their shards from it in the next step.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch
from torch import Tensor, nn

from mirrored.context import current_frame
from mirrored.interceptor import interceptor
from mirrored.keras import keras_private
from mirrored.keras.keras_private import around
from mirrored.strategy.base import Strategy
from towers.collectives.values import all_reduce_together
from towers.sharding.optimizer import OptimizerSharder
from towers.sharding.shards import Shard
from towers.system.torch_private import disable_dynamo

_ELEMENTWISE = {"SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Nadam", "Ftrl", "Lion"}
"""Names of Keras' optimizers that update each element independently."""

Slot = tuple[Any, str, Any]
"""A variable of a model, the name of a value of its optimizer, and the optimizer's variable for it."""

_slots: weakref.WeakKeyDictionary[Any, list[Slot]] = weakref.WeakKeyDictionary()  # by optimizer


@around(keras.optimizers.Optimizer, "add_variable_from_reference")
def _add_variable(original: Any, optimizer: Any, reference_variable: Any, name: Any = None, **options: Any) -> Any:
    slot = original(optimizer, reference_variable, name, **options)
    _slots.setdefault(optimizer, []).append((reference_variable, name or "var", slot))
    return slot


class _Step(torch.optim.Optimizer):
    """A torch optimizer whose step calls a function."""

    def __init__(self, parameters: Sequence[Tensor], optimizer: Any) -> None:
        super().__init__(parameters, {})
        self.state[parameters[0]] = {variable.path: variable.value for variable in optimizer.variables}

    def step(
        self, closure: Any = None, *, gradients: Sequence[Any] = (), apply: Callable[[], Any] = lambda: None
    ) -> Any:
        """Calls ``apply``. The guard reads ``gradients``, which need not be those of the parameters' ``.grad``."""
        return apply()


class _ShardedStep(torch.optim.Optimizer):
    """A Keras optimizer as one of torch that can be sharded; see [Note: sharded steps of Keras].

    Its inner one has the attributes ``_own``, a Keras optimizer, and ``_variables`` of that, one for each shard.
    """

    def __init__(self, optimizer: Any, strategy: Strategy) -> None:
        comm = strategy.communicator
        self.one_tower_reads_state = strategy.engine.one_tower_reads_state
        self._model_variables = keras_private.variables_of_optimizer(optimizer)
        super().__init__([variable.value for variable in self._model_variables], {})
        self._optimizer = weakref.ref(optimizer)
        self._comm = comm
        kinds = {variable.value.dtype for variable in self._model_variables}
        self._dtype = torch.float64 if torch.float64 in kinds else torch.float32
        self._outer = weakref.ref(self)
        self._slots = list(_slots.get(optimizer, []))
        self._versions: list[int] = []  # of the slots' values, when they were shown
        for _, _, slot in self._slots:
            slot.__class__ = _class_of_shown(type(slot))
            slot.show = self.show

    def show(self) -> None:
        """Gives the slots the state of all towers, until the next step."""
        state = self.state_dict()["state"]
        places = {id(variable): place for place, variable in enumerate(self._model_variables)}
        for variable, name, slot in self._slots:
            slot.shown = state[places[id(variable)]][name]
        self._versions = [slot.shown._version for *_, slot in self._slots]

    @property
    def hides_state(self) -> bool:
        """Whether the next read of a slot calls :meth:`show`."""
        return any(slot.shown is None for *_, slot in self._slots)

    def take_written(self) -> None:
        """Takes the state from the slots, if they have been written to, and then their memory."""
        if self.hides_state:
            return
        values = [slot.shown for *_, slot in self._slots]
        if [value._version for value in values] != self._versions:
            state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
            for (variable, name, _), value in zip(self._slots, values, strict=True):
                state[variable.value][name] = value.detach()
            self.state = state
        for *_, slot in self._slots:
            slot.shown = None

    def take_shards(self, shards: Sequence[Shard], parameters: Sequence[nn.Parameter]) -> None:
        """Gives an inner optimizer its shards."""
        optimizer = self._optimizer()
        of_value = {id(variable.value): place for place, variable in enumerate(self._model_variables)}
        self._places = [of_value[id(shard.parameter)] for shard in shards]
        owners = [self._model_variables[place] for place in self._places]
        self._counts = [not shard.whole or self._comm.index == 0 for shard in shards]
        with keras.device(str(parameters[0].device if parameters else self._comm.device)):
            self._variables = [
                keras.Variable(parameter, dtype=variable.dtype, name=variable.name)
                for parameter, variable in zip(parameters, owners, strict=True)
            ]
            # A tower without shards steps, too: some optimizers have values of no parameter.
            self._stand_in = keras.Variable(torch.zeros(1, dtype=self._dtype), name="stand_in")
            self._own = keras_private.copy_of_optimizer(optimizer)
            self._own.build([*self._variables, self._stand_in])
        self._of_own = _slots.get(self._own, [])
        of_shard = {id(variable): owner for variable, owner in zip(self._variables, owners, strict=True)}
        keras_private.replace_clipping(self._own, self._clip)
        keras_private.replace_weight_decay(self._own, optimizer, lambda variable: of_shard.get(id(variable)))

    def step(self, closure: Any = None) -> Any:
        """Updates the shards of an inner optimizer. The outer one has none."""
        if self._outer() is self:
            return
        for variable, name, slot in self._of_own:
            if variable is not self._stand_in:
                keras_private.set_memory(slot, self.state[variable.value][name])
        used = [(variable, variable.value.grad) for variable in self._variables if variable.value.grad is not None]
        variables, gradients = zip(*(used or [(self._stand_in, torch.zeros_like(self._stand_in.value))]), strict=True)
        keras_private.apply_like(self._optimizer(), self._own, list(gradients), list(variables))

    def _clip(self, gradients: list[Any], variables: Sequence[Any], each: float | None, all: float | None) -> list[Any]:
        """Returns the gradients of shards, clipped by norms of whole gradients.

        Args:
            each, all: the largest norm of one parameter's gradient, and of all gradients together.
        """
        places = {id(v): (place, c) for v, place, c in zip(self._variables, self._places, self._counts, strict=True)}
        squares = torch.zeros(len(self._model_variables), dtype=self._dtype, device=self._comm.device)
        where = [places.get(id(variable), (0, False)) for variable in variables]
        for gradient, (place, counts) in zip(gradients, where, strict=True):
            if counts:
                squares[place] += gradient.to(self._dtype).square().sum().to(squares.device)
        (squares,) = all_reduce_together(self._comm, "sum", [squares])
        if all is not None:
            norm = squares.sum().sqrt()
            scale = all * torch.minimum(1.0 / norm, torch.full_like(norm, 1.0 / all)) + (norm - norm)
            return [gradient * scale.to(gradient) for gradient in gradients]
        assert each is not None
        scales = each / squares.sqrt().clamp(min=each)
        return [gradient * scales[place].to(gradient) for gradient, (place, _) in zip(gradients, where, strict=True)]


class _Shown:
    """Makes a Keras variable show its optimizer's state of all towers.

    Attributes:
        shown: the value, of the variable's shape; None until the next read.
        show: sets ``shown``.
    """

    show: Callable[[], None]

    @property
    def _value(self) -> Any:
        if self.shown is None:
            self.show()
        return self.shown

    @_value.setter
    def _value(self, value: Any) -> None:
        self.shown = value

    @property
    def shown(self) -> Any:
        return vars(self)["_value"]

    @shown.setter
    def shown(self, value: Any) -> None:
        vars(self)["_value"] = value


_shown_classes: dict[type, type] = {}


def _class_of_shown(kind: type) -> type:
    return _shown_classes.setdefault(kind, type(kind.__name__, (_Shown, kind), {}))


_steps: weakref.WeakKeyDictionary[Any, _Step] = weakref.WeakKeyDictionary()
_sharded_steps: weakref.WeakKeyDictionary[Any, _ShardedStep] = weakref.WeakKeyDictionary()


def show_state(optimizer: Any) -> None:
    """Shows the sharded state of an optimizer to the tower that is about to save it. All towers call it."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    step = _sharded_steps.get(optimizer) if optimizer is not None else None
    if step is not None and step.hides_state and not step.one_tower_reads_state:
        step.show()


_applying = False  # a Keras optimizer may contain another one


@around(keras.optimizers.Optimizer, "apply")
def _apply(original: Any, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
    global _applying
    frame = current_frame()
    if _applying or frame is None or frame.replica is None or trainable_variables is None:
        return original(optimizer, grads, trainable_variables)
    strategy = frame.strategy
    if isinstance(strategy, Strategy) and strategy.engine.attached(OptimizerSharder) is not None:
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):  # which calls its inner one
            return original(optimizer, grads, trainable_variables)
        return _apply_sharded(optimizer, list(grads), list(trainable_variables), strategy)
    if not (strategy.num_replicas_in_sync > 1 or interceptor().compares):
        return original(optimizer, grads, trainable_variables)
    grads, trainable_variables = list(grads), list(trainable_variables)
    parameters = [variable.value for variable in trainable_variables]
    step = _steps.get(optimizer)
    if step is None or [id(p) for p in step.param_groups[0]["params"]] != [id(p) for p in parameters]:
        kind = type(optimizer).__name__
        step = _steps[optimizer] = type(kind, (_Step,), {})(parameters, optimizer)
    _applying = True
    try:
        return step.step(gradients=grads, apply=lambda: original(optimizer, grads, trainable_variables))
    finally:
        _applying = False


@disable_dynamo
def _apply_sharded(optimizer: Any, grads: list[Any], variables: list[Any], strategy: Strategy) -> None:
    grads, used = keras_private.used_gradients(optimizer, grads, variables)
    step = _sharded_steps.get(optimizer)
    if step is None:
        kind = type(optimizer)
        is_known = kind.__name__ in _ELEMENTWISE and keras_private.is_of_keras(kind)
        elementwise = getattr(kind, "elementwise", is_known)
        step = type(kind.__name__, (_ShardedStep,), {"elementwise": elementwise})(optimizer, strategy)
        _sharded_steps[optimizer] = step
    with torch.no_grad():
        for variable, gradient in zip(used, grads, strict=True):
            own = variable.value.grad
            if own is None:
                variable.value.grad = gradient
            elif own is not gradient:
                own.copy_(gradient)
    step.take_written()
    step.step()
    keras_private.finish_step(optimizer, used)
