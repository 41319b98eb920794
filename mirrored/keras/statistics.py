"""Variables that layers change in a step without a gradient, such as moving statistics. They are equal after the step.

The variables are combined by their ``aggregation``. ``"mean"`` is the mean over the examples of the step, and so is
``"none"``, which Keras' own layers use. ``"sum"`` adds up the changes of the towers. ``"only_first_replica"`` is tower
0's value. Integers with ``"none"``, such as the states of seed generators and counters, are equal on every tower.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import torch
from torch import Tensor

from mirrored.keras.batch_norm import takes_global_statistics
from mirrored.keras.keras_private import variables_of_trained_layers
from mirrored.keras.steps import Step
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
