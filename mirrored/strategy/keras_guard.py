"""Keras layers that train outside of a strategy's reach.

A Keras 3 layer on torch makes its parameters when it is built, which may be after the scope, and is trained by an
optimizer that is none of torch's. So neither a scope nor the guard of optimizers sees it.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from mirrored.strategy.guard import how_to_fit
from mirrored.strategy.scope import Recorder
from towers.errors import MirrorError
from towers.system.autograd_hooks import GradientHook

_PARAMETERS = "_torch_params"  # the name of the ParameterDict that a Keras layer makes when it is built


_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()
"""Those of all strategies in this process."""


def guard_keras_layers(tower: int, recorder: Recorder) -> None:
    """Refuse gradients of Keras layers that no scope has recorded, as long as a strategy's recorder lives.

    Args:
        tower: this one, for messages.
        recorder: knows the parameters of the strategy's scopes.
    """
    _recorders.add(recorder)

    def on_child(layer: nn.Module, name: str, child: nn.Module | None) -> None:
        parameters = child.named_parameters() if child is not None and name == _PARAMETERS else ()
        for key, parameter in parameters:
            if parameter.is_floating_point() and not _is_recorded(parameter):
                _refuse_gradient(tower, parameter, f"{key} of a Keras {type(layer).__name__}")

    handle: Any = register_module_module_registration_hook(on_child)  # type: ignore[no-untyped-call]
    weakref.finalize(recorder, handle.remove)


def _is_recorded(parameter: torch.Tensor) -> bool:
    return any(recorder.knows(parameter) for recorder in _recorders)


def _refuse_gradient(tower: int, parameter: torch.Tensor, name: str) -> None:
    def refuse(parameter: torch.Tensor) -> None:
        if parameter.requires_grad and not _is_recorded(parameter):
            raise MirrorError(
                f"backward() on tower {tower} reached {name}, which no scope mirrored, so the towers would "
                "drift apart. A Keras layer makes its parameters when it is built: build the model inside "
                "strategy.scope() (model.build(input_shape), or a call with an example), or call "
                "strategy.mirror(model) when it is built, and train it inside strategy.run" + how_to_fit()
            )

    GradientHook(parameter, refuse)
