"""Keras layers that train outside of a strategy's reach.

A Keras 3 layer on torch makes its parameters when it is built, which may be after the scope, and is trained by an
optimizer that is none of torch's. So neither a scope nor the guard of optimizers sees it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from towers.errors import MirrorError
from towers.system.autograd_hooks import GradientHook

_PARAMETERS = "_torch_params"  # of a Keras layer, a ParameterDict that it makes when it is built


def how_to_fit() -> str:
    """What an error says to somebody who may have called Keras' ``fit`` without :mod:`mirrored.keras`."""
    if "keras" not in sys.modules or "mirrored.keras" in sys.modules:
        return ""
    return ". If it was Keras' model.fit: put the line 'import mirrored.keras' before 'import keras'"


class KerasGuard:
    """Refuses gradients of Keras layers that no scope mirrored.

    Args:
        tower: this one, for messages.
        is_known: whether a parameter is mirrored, or was recorded to be.
    """

    def __init__(self, tower: int, is_known: Callable[[torch.Tensor], bool]) -> None:
        self._tower = tower
        self._is_known = is_known
        guard = weakref.WeakMethod(self._watch)

        def on_child(module: nn.Module, name: str, child: nn.Module | None) -> None:
            watch = guard() if name == _PARAMETERS else None
            if watch is not None and child is not None:
                watch(module, child)

        handle: Any = register_module_module_registration_hook(on_child)  # type: ignore[no-untyped-call]
        weakref.finalize(self, handle.remove)

    def _watch(self, layer: nn.Module, parameters: nn.Module) -> None:
        for name, parameter in parameters.named_parameters():
            if parameter.is_floating_point() and not self._is_known(parameter):
                self._refuse_gradient(parameter, f"{name} of a Keras {type(layer).__name__}")

    def _refuse_gradient(self, parameter: torch.Tensor, name: str) -> None:
        def refuse(parameter: torch.Tensor) -> None:
            if parameter.requires_grad and not self._is_known(parameter):
                raise MirrorError(
                    f"backward() on tower {self._tower} reached {name}, which no scope mirrored, so the towers would "
                    "drift apart. A Keras layer makes its parameters when it is built: build the model inside "
                    "strategy.scope() (model.build(input_shape), or a call with an example), or call "
                    "strategy.mirror(model) when it is built, and train it inside strategy.run" + how_to_fit()
                )

        GradientHook(parameter, refuse)
