"""Steps of Keras' optimizers under a strategy, also with state that is sharded over the towers.

[Note: a step of torch's around Keras'] Keras' optimizers are not torch optimizers, so torch's hooks do not report their
steps. So in ``strategy.run``, a Keras optimizer applies gradients within the step of a torch optimizer of the same
parameters. This step triggers the guard of unaveraged gradients, the mirror check (also of optimizer state), the
failure report, the profiler's ranges and ``mirrored verify``.

That torch optimizer can also be divided (:mod:`mirrored.keras.divided_steps`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch
from torch import Tensor

from mirrored.context import current_frame
from mirrored.interceptor import interceptor
from mirrored.keras import keras_private
from mirrored.keras.divided_steps import ShardedStep, class_for
from mirrored.keras.keras_private import around
from mirrored.strategy.base import Strategy
from towers.sharding.optimizer import OptimizerSharder
from towers.system.torch_private import disable_dynamo


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


_steps: weakref.WeakKeyDictionary[Any, _Step] = weakref.WeakKeyDictionary()
_sharded_steps: weakref.WeakKeyDictionary[Any, ShardedStep] = weakref.WeakKeyDictionary()


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
        step = _sharded_steps[optimizer] = class_for(optimizer, ShardedStep)(optimizer, strategy)
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
