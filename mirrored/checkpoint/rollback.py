"""Rollbacks: functions that give an object the state back that it had, whatever a failed load has done to it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from mirrored.attached import metrics
from towers.system.torch_private import own_buffers, own_parameters

Rollback = Callable[[], None]


def module_rollback(module: nn.Module) -> Rollback:
    """A module's rollback. Values are copied to the CPU: GPUs may not have the memory for another model."""
    tensors = [*module.parameters(), *module.buffers()]
    values = [(t, t.detach().to("cpu", copy=True)) for t in tensors if not is_lazy(t)]
    lazy = [(t, type(t)) for t in tensors if is_lazy(t)]
    layers = [layer for layer in module.modules() if not isinstance(layer, torch.jit.ScriptModule)]
    tables: list[tuple[Any, dict[str, Any]]] = []
    tables += [(table, dict(table)) for layer in layers for table in (own_parameters(layer), own_buffers(layer))]
    extra = [(layer, copy.deepcopy(layer.get_extra_state())) for layer in layers if _has_extra_state(layer)]
    counted = metrics.states_of(module)

    def roll_back() -> None:
        try:
            for layer, state in extra:
                layer.set_extra_state(state)
        finally:  # also where it raises
            metrics.set_states_of(module, counted)
            for table, before in tables:
                table.update(before)
            with torch.no_grad():
                for tensor, value in values:
                    tensor.copy_(value)
            for tensor, kind in lazy:
                if not is_lazy(tensor):  # the load gave it a shape
                    tensor.data = tensor.new_empty(0)
                    tensor.__class__ = kind

    return roll_back


def optimizer_rollback(optimizer: Optimizer) -> Rollback:
    """An optimizer's rollback. Nothing is copied: when torch loads, it leaves the old state and groups unchanged."""
    state, groups = optimizer.state, optimizer.param_groups
    settings = [dict(group) for group in groups]

    def roll_back() -> None:
        optimizer.state, optimizer.param_groups = state, groups
        for group, before in zip(groups, settings, strict=True):
            group.clear()
            group.update(before)

    return roll_back


def object_rollback(target: Any) -> Rollback:
    """The rollback of an object's state, and of attributes beside it, such as the position of a loop over the data."""
    state = copy.deepcopy(target.state_dict())
    attributes = getattr(target, "__dict__", None)
    before = attributes.copy() if isinstance(attributes, dict) else {}

    def roll_back() -> None:
        try:
            target.load_state_dict(state)
        finally:
            if isinstance(attributes, dict):
                attributes.update(before)
                for name in attributes.keys() - before.keys():
                    del attributes[name]

    return roll_back


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state
