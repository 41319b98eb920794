"""What leads back to how a thing was before it was given another state, whatever the attempt has done to it."""

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

WayBack = Callable[[], None]


def of_module(module: nn.Module) -> WayBack:
    """Values are copied to the CPU: GPUs may have no room for another model."""
    tensors = [*module.parameters(), *module.buffers()]
    values = [(t, t.detach().to("cpu", copy=True)) for t in tensors if not is_lazy(t)]
    lazy = [(t, type(t)) for t in tensors if is_lazy(t)]
    parts = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
    tables: list[tuple[Any, dict[str, Any]]] = []
    tables += [(table, dict(table)) for part in parts for table in (own_parameters(part), own_buffers(part))]
    extra = [(part, copy.deepcopy(part.get_extra_state())) for part in parts if _has_extra_state(part)]
    counted = metrics.states_of(module)

    def go_back() -> None:
        try:
            for part, state in extra:
                part.set_extra_state(state)
        finally:  # also where it refused, whatever it has done before
            metrics.set_states_of(module, counted)
            for table, before in tables:
                table.update(before)
            with torch.no_grad():
                for tensor, value in values:
                    tensor.copy_(value)
            for tensor, kind in lazy:
                if not is_lazy(tensor):  # it was given a shape
                    tensor.data = tensor.new_empty(0)
                    tensor.__class__ = kind

    return go_back


def of_optimizer(optimizer: Optimizer) -> WayBack:
    """Nothing is copied: torch replaces state and groups when it loads, and leaves what they were alone."""
    state, groups = optimizer.state, optimizer.param_groups
    settings = [dict(group) for group in groups]

    def go_back() -> None:
        optimizer.state, optimizer.param_groups = state, groups
        for group, before in zip(groups, settings, strict=True):
            group.clear()
            group.update(before)

    return go_back


def of_object(thing: Any) -> WayBack:
    """Its state, and also what no state tells, such as where a loop over the data stands."""
    state = copy.deepcopy(thing.state_dict())
    held = getattr(thing, "__dict__", None)
    attributes = held.copy() if isinstance(held, dict) else {}

    def go_back() -> None:
        try:
            thing.load_state_dict(state)
        finally:
            if isinstance(held, dict):
                held.update(attributes)
                for name in held.keys() - attributes.keys():
                    del held[name]

    return go_back


def _has_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state
