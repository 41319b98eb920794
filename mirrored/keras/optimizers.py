"""Makes steps of Keras' optimizers visible as steps of a torch optimizer.

[Note: a step of torch's around Keras'] Keras' optimizers are not torch optimizers, so torch's hooks do not report their
steps. So in ``strategy.run``, a Keras optimizer applies gradients within the step of a torch optimizer of the same
parameters. This step triggers the guard of unaveraged gradients, the mirror check (also of optimizer state), the
failure report, the profiler's ranges and ``mirrored verify``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import torch

from mirrored.context import current_frame
from mirrored.interceptor import interceptor
from mirrored.keras.patching import around


class _Step(torch.optim.Optimizer):
    """A torch optimizer whose step calls a function."""

    def __init__(self, parameters: Sequence[torch.Tensor], optimizer: Any) -> None:
        super().__init__(parameters, {})
        self.state[parameters[0]] = {variable.path: variable.value for variable in optimizer.variables}

    def step(
        self, closure: Any = None, *, gradients: Sequence[Any] = (), apply: Callable[[], Any] = lambda: None
    ) -> Any:
        """Calls ``apply``. The guard reads ``gradients``, which need not be those of the parameters' ``.grad``."""
        return apply()


_steps: weakref.WeakKeyDictionary[Any, _Step] = weakref.WeakKeyDictionary()
_applying = False  # a Keras optimizer may contain another one


@around(keras.optimizers.Optimizer, "apply")
def _apply(original: Any, optimizer: Any, grads: Any, trainable_variables: Any = None) -> Any:
    global _applying
    frame = current_frame()
    watched = frame is not None and (frame.strategy.num_replicas_in_sync > 1 or interceptor().compares)
    if _applying or not watched or frame is None or frame.replica is None or trainable_variables is None:
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
