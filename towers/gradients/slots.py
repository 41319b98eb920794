"""The known state of one parameter's gradient between two steps."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from towers.system.autograd_hooks import GradientHook
from towers.system.memory_layout import gradient_dtype
from towers.system.named import Named
from towers.system.torch_private import DisableTorchFunctionSubclass

_P = ParamSpec("_P")
_R = TypeVar("_R")


def handles_gradients(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorates methods that process gradients.

    Inside, autograd records nothing, and a lazily gathered gradient is plain memory.
    """

    @functools.wraps(method)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with torch.no_grad(), DisableTorchFunctionSubclass():
            return method(*args, **kwargs)

    return wrapper


class Slot:
    """One parameter and the state of its gradient. It does not keep the parameter alive.

    Attributes:
        name, trainable: the parameter's (:class:`towers.system.named.Named`).
        parameter: returns the parameter when it is called, or None if its model is gone.
        shape, device: the parameter's when the slot was made.
        dtype: its gradient's.
        arrived: whether autograd has finished its gradient of this backward.
        unsynced: whether gradients of this tower alone were accumulated in it (``no_sync``).
        averaged: the number of the last average for which any tower had a gradient of it.
        hook: reports its gradients; None for a parameter of whole numbers.
    """

    __slots__ = (
        "arrived",
        "averaged",
        "device",
        "dtype",
        "hook",
        "name",
        "parameter",
        "shape",
        "trainable",
        "unsynced",
    )

    def __init__(self, named: Named) -> None:
        self.name = named.name
        self.trainable = named.trainable
        self.parameter = weakref.ref(named.tensor)
        self.shape, self.device = named.tensor.shape, named.tensor.device
        self.dtype = gradient_dtype(named.tensor)
        self.arrived = False
        self.unsynced = False
        self.averaged = 0
        self.hook: GradientHook | None = None

    @property
    def gradient(self) -> Tensor | None:
        """The parameter's gradient, or None."""
        return None if (parameter := self.parameter()) is None else parameter.grad

    @property
    def holds_unsynced(self) -> bool:
        """Whether there still is a gradient of this tower alone: ``zero_grad`` may have dropped it."""
        return self.unsynced and self.gradient is not None

    @property
    def fresh(self) -> bool:
        """Whether this tower has its own contribution."""
        return self.arrived or self.holds_unsynced
