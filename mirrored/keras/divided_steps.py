"""Steps of a Keras optimizer that are divided, over towers or parameter servers (:mod:`mirrored.keras.served`).

[Note: Keras' optimizer inside torch's] A Keras optimizer becomes a torch optimizer of the same parameters, which can be
divided like all others. Each part has a Keras optimizer of the same class and settings, whose variables are the part's
shards. Everything that updates each element independently happens there: weight decay, accumulation of gradients,
moving averages of weights, the step. The variables of the script's optimizer have no memory. If one is read, all of
them receive the values of all parts until the next step. If one is written to, as by ``load_weights``, all parts take
their values from it in the next step.

[Note: sharded steps of Keras] Two things need whole parameters with ``shard_optimizer=True`` and in central storage:
clipping by norms, for which the towers add up the squares of their shards, and constraints, which every tower applies
after the step.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import torch
from torch import Tensor, nn

from mirrored.keras import keras_private
from mirrored.keras.keras_private import around
from mirrored.strategy.base import Strategy
from towers.collectives.values import all_reduce_together
from towers.sharding.shards import Shard

_slots: weakref.WeakKeyDictionary[Any, list[tuple[Any, str, Any]]] = weakref.WeakKeyDictionary()
"""By optimizer: variables of the model, each with the name of a value of the optimizer, and the variable for it."""


@around(keras.optimizers.Optimizer, "add_variable_from_reference")
def _add_variable(original: Any, optimizer: Any, reference_variable: Any, name: Any = None, **options: Any) -> Any:
    slot = original(optimizer, reference_variable, name, **options)
    _slots.setdefault(optimizer, []).append((reference_variable, name or "var", slot))
    return slot


@dataclass(frozen=True)
class Described:
    """A variable of a model, as an optimizer needs it.

    Attributes:
        decays: whether the optimizer's weight decay applies to it.
    """

    name: str
    dtype: str
    decays: bool
    constraint: Any


class DividedStep(torch.optim.Optimizer):
    """A Keras optimizer as one of torch whose steps and state are divided.

    See [Note: Keras' optimizer inside torch's].

    Attributes:
        elementwise: whether it updates each element independently.
        of_model: the parameters of the model.
        own: in a part: the Keras optimizer of its shards.
        slots: the variables of the script's optimizer, each with the place of its parameter, and its name.
    """

    elementwise = False

    def __init__(self, optimizer: Any) -> None:
        variables = keras_private.variables_of_optimizer(optimizer)
        self.of_model: list[Tensor] = [variable.value for variable in variables]
        super().__init__(self.of_model, {})
        self._optimizer = weakref.ref(optimizer)
        self._described = [
            Described(variable.name, variable.dtype, keras_private.decays(optimizer, variable), variable.constraint)
            for variable in variables
        ]
        kinds = {variable.value.dtype for variable in variables}
        self._dtype = torch.float64 if torch.float64 in kinds else torch.float32
        places = {id(variable): place for place, variable in enumerate(variables)}
        self.slots = [(places[id(owner)], name, slot) for owner, name, slot in _slots.get(optimizer, [])]
        self._add_slots(optimizer)
        self._versions: list[int] = []  # of the slots' values, when they were shown
        for _, _, slot in self.slots:
            slot.__class__ = _class_of_shown(type(slot))
            slot.show = weakref.WeakMethod(self.show)

    def _add_slots(self, optimizer: Any) -> None:
        """Adds variables of the optimizer that belong to no parameter, at the place of the first one."""

    # -- the script's optimizer --------------------------------------------------------------------------

    def show(self) -> None:
        """Gives the slots the state of all parts, until the next step."""
        state = self.state_dict()["state"]
        for place, name, slot in self.slots:
            slot.shown = state[place][name]
        self._versions = [slot.shown._version for *_, slot in self.slots]

    @property
    def hides_state(self) -> bool:
        """Whether the next read of a slot calls :meth:`show`."""
        return any(slot.shown is None for *_, slot in self.slots)

    def take_written(self) -> bool:
        """Takes the state from the slots, if they have been written to, and then their memory.

        Returns:
            Whether they have been written to.
        """
        if self.hides_state:
            return False
        values = [slot.shown for *_, slot in self.slots]
        written = [value._version for value in values] != self._versions
        if written:
            state: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
            for (place, name, _), value in zip(self.slots, values, strict=True):
                state[self.of_model[place]][name] = value.detach()
            self.state = state
        for *_, slot in self.slots:
            slot.shown = None
        return written

    # -- a part of it ------------------------------------------------------------------------------------

    def divide(self, owners: Sequence[int], parameters: Sequence[Tensor], device: torch.device, own: Any) -> None:
        """Makes this the optimizer of a part.

        Args:
            owners: the place of the parameter of each shard.
            parameters: the shards.
            own: a Keras optimizer without variables.
        """
        self._owners = owners
        self._parameters = parameters
        described = [self._described[place] for place in owners]
        with keras.device(str(device)):
            self._variables = [
                keras.Variable(
                    parameter if isinstance(parameter, nn.Parameter) else nn.Parameter(parameter, requires_grad=False),
                    dtype=each.dtype,
                    name=each.name,
                )
                for parameter, each in zip(parameters, described, strict=True)
            ]
            # A part without shards steps, too: some optimizers have values of no parameter.
            self._stand_in = keras.Variable(torch.zeros(1, dtype=self._dtype), name="stand_in")
            self.own = own
            own.build([*self._variables, self._stand_in])
        self._place = {id(variable): place for place, variable in enumerate(self._variables)}
        self._slots_of_own = [
            (parameters[place], name, slot)
            for variable, name, slot in _slots.get(own, [])
            if (place := self._place.get(id(variable))) is not None
        ]
        decays = {id(variable): each.decays for variable, each in zip(self._variables, described, strict=True)}
        keras_private.replace_weight_decay(own, lambda variable: decays.get(id(variable), True))

    def _used(self) -> tuple[list[Any], list[Any]]:
        """Gives the part's Keras optimizer its state. Returns the gradients, with their variables."""
        for parameter, name, slot in self._slots_of_own:
            keras_private.set_memory(slot, self.state[parameter][name])
        pairs = zip(self._variables, self._parameters, strict=True)
        used = [(parameter.grad, variable) for variable, parameter in pairs if parameter.grad is not None]
        gradients, variables = zip(*(used or [(torch.zeros_like(self._stand_in.value), self._stand_in)]), strict=True)
        return list(gradients), list(variables)


_ELEMENTWISE = {"SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Nadam", "Ftrl", "Lion"}
"""Names of Keras' optimizers that update each element independently."""


def class_for(optimizer: Any, kind: type[DividedStep]) -> Any:
    """Returns a class of divided steps for a Keras optimizer, with its name."""
    of_keras = type(optimizer)
    is_known = of_keras.__name__ in _ELEMENTWISE and keras_private.is_of_keras(of_keras)
    return class_named(of_keras.__name__, getattr(of_keras, "elementwise", is_known), kind)


def class_named(name: str, elementwise: bool, kind: type[DividedStep]) -> Any:
    """Returns a class of divided steps with another name."""
    return type(name, (kind,), {"elementwise": elementwise})


class ShardedStep(DividedStep):
    """A Keras optimizer that can be sharded over the towers; see [Note: sharded steps of Keras]."""

    def __init__(self, optimizer: Any, strategy: Strategy) -> None:
        super().__init__(optimizer)
        self.one_tower_reads_state = strategy.engine.one_tower_reads_state
        self._comm = strategy.communicator
        self._outer = weakref.ref(self)

    def take_shards(self, shards: Sequence[Shard], parameters: Sequence[nn.Parameter]) -> None:
        """Gives an inner optimizer its shards."""
        places = {id(parameter): place for place, parameter in enumerate(self.of_model)}
        owners = [places[id(shard.parameter)] for shard in shards]
        self._counts = [not shard.whole or self._comm.index == 0 for shard in shards]
        device = parameters[0].device if parameters else self._comm.device
        self.divide(owners, parameters, device, keras_private.copy_of_optimizer(self._optimizer()))
        keras_private.replace_clipping(self.own, self._clip)

    def step(self, closure: Any = None) -> Any:
        """Updates the shards of an inner optimizer. The outer one has none."""
        if self._outer() is not self:
            keras_private.apply_like(self._optimizer(), self.own, *self._used())

    def _clip(self, gradients: list[Any], variables: Sequence[Any], each: float | None, all: float | None) -> list[Any]:
        """Returns the gradients of shards, clipped by norms of whole gradients.

        Args:
            each, all: the largest norm of one parameter's gradient, and of all gradients together.
        """
        places = {id(v): (place, c) for v, place, c in zip(self._variables, self._owners, self._counts, strict=True)}
        squares = torch.zeros(len(self.of_model), dtype=self._dtype, device=self._comm.device)
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
        show: a weak reference to the method that sets ``shown``.
    """

    show: weakref.WeakMethod[Callable[[], None]]

    @property
    def _value(self) -> Any:
        if self.shown is None and (show := self.show()) is not None:
            show()
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
