"""``F.batch_norm`` in the forward of a layer that normalises over the global batch.

[Note: forwards of their own] A subclass of BatchNorm may do more in its forward than normalise: drop, activate, scale
by a condition. It normalises by ``super().forward(x)``, by a method of torch's class, or by ``F.batch_norm`` with its
own parameters. All of these, and torch's forward itself, look that function up by its name in ``torch.nn.functional``.
So while a forward runs, another function has the name. It answers the layer's own calls and hands the others on. A
forward without such a call takes statistics in a way that cannot be made global; that is an error.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from towers.system.torch_private import BatchNormBase

Normalise = Callable[
    [BatchNormBase, Tensor, Tensor | None, Tensor | None, tuple[Tensor, Tensor] | None, float, float], Tensor
]
"""From a layer, its input, weight, bias, running mean and variance, momentum and eps, the output in training mode."""


class OwnCalls:
    """The context of one forward of a layer.

    Attributes:
        layer: whose calls of ``F.batch_norm`` are answered.
        normalise: answers them in training mode.
        answered: whether there was a call of the layer's own.
    """

    def __init__(self, layer: BatchNormBase, normalise: Normalise) -> None:
        self.layer = layer
        self.normalise = normalise
        self.answered = False

    def __enter__(self) -> OwnCalls:
        global _forwards, _original
        with _lock:
            if _forwards == 0:
                _original, F.batch_norm = F.batch_norm, _batch_norm
            _forwards += 1
        self._outer = _inside.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        global _forwards
        _inside.reset(self._outer)
        with _lock:
            _forwards -= 1
            if _forwards == 0:
                F.batch_norm = _original

    def is_own(self, *tensors: Tensor | None) -> bool:
        """Whether a call with these statistics, weight and bias is the layer's own."""
        layer = self.layer
        of_layer = layer.running_mean, layer.running_var, layer.weight, layer.bias
        return all(tensor is None for tensor in of_layer) or any(
            tensor is not None and tensor is layers_own for tensor, layers_own in zip(tensors, of_layer, strict=True)
        )


_inside: ContextVar[OwnCalls | None] = ContextVar("the innermost forward that this thread is in", default=None)
_lock = threading.Lock()
_forwards = 0  # in which all threads are
_original: Any = None


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """The function that stands in place of ``F.batch_norm`` while a layer's forward runs."""
    forward = _inside.get()
    if forward is not None and forward.is_own(running_mean, running_var, weight, bias):
        forward.answered = True
        if training:
            running = None if running_mean is None or running_var is None else (running_mean, running_var)
            return forward.normalise(forward.layer, input, weight, bias, running, momentum, eps)
    result: Tensor = _original(input, running_mean, running_var, weight, bias, training, momentum, eps)
    return result
