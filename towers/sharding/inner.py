"""The inner optimizer: it does the work of a sharded optimizer, over this tower's shards.

[Note: the optimizer stays the script's] The inner optimizer has the same class and settings. The script's own ``step``
runs with empty groups, between its hooks. So schedulers, scalers, hooks, ``add_param_group`` and ``load_state_dict``
work as usual, and only ``optimizer.state[p]`` is refused. The inner optimizer is made at the first step, so an
optimizer may be created in the scope or later. Shards are the chunks in which the buckets are reduced, so any optimizer
over any of the parameters fits them.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)

from towers.errors import MirrorError
from towers.sharding.shards import Shard
from towers.system.torch_private import compiler_traces

_OWN_SETTINGS = ("params", "capturable")
"""Settings that an optimizer and its inner one do not share: torch.compile makes only the outer one capturable."""

_ELEMENTWISE = (SGD, Adam, AdamW, RMSprop, Adagrad, Adadelta, Adamax, NAdam, RAdam, Rprop, ASGD, SparseAdam)


def check_elementwise(optimizer: Optimizer, feature: str, remedy: str) -> None:
    """Checks that an optimizer computes the same over shards as over whole parameters.

    Args:
        feature, remedy: the name of the feature and the advice, for the error.

    Raises:
        MirrorError: that is not known of the optimizer.
    """
    kind = type(optimizer)
    if kind not in _ELEMENTWISE and not getattr(kind, "elementwise", False):
        known = ", ".join(sorted(known.__name__ for known in _ELEMENTWISE))
        raise MirrorError(
            f"{feature} cannot shard {kind.__name__}.step(): sharding is known to be right for optimizers that "
            f"update each element independently ({known}). If {kind.__name__} does, set "
            f"{kind.__name__}.elementwise = True; otherwise {remedy}"
        )
    if optimizer.defaults.get("differentiable"):
        raise MirrorError(f"{feature} cannot shard an optimizer with differentiable=True")


def inner_optimizer(optimizer: Optimizer) -> Optimizer:
    """Returns another optimizer of the same class with the same settings, without parameters, state or hooks."""
    inner: Optimizer = object.__new__(type(optimizer))
    hooks = {name: OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")}  # type: ignore[var-annotated]
    inner.__dict__.update(vars(optimizer), **hooks, state=defaultdict(dict), param_groups=[])
    inner.__dict__.pop("step", None)  # schedulers wrap it
    return inner


def inner_parameter(shard: Shard, memory: Tensor) -> nn.Parameter:
    """Returns a parameter of the inner optimizer, in the memory of the shard."""
    parameter = nn.Parameter(memory, requires_grad=False)
    if parameter.dtype != shard.slot.dtype:
        parameter.grad_dtype = shard.slot.dtype
    return parameter


def make_groups(optimizer: Optimizer, inner: Optimizer, shards: list[Shard], parameters: list[nn.Parameter]) -> None:
    """Gives the inner optimizer the groups of the outer one, with this tower's shards.

    An optimizer with a method ``take_shards`` receives them by that method, too.

    Args:
        parameters: the inner optimizer's, one for each shard.
    """
    defaults = {name: optimizer.defaults[name] for name in _OWN_SETTINGS if name in optimizer.defaults}
    inner.param_groups = [{**group, **defaults, "params": []} for group in optimizer.param_groups]
    for shard, parameter in zip(shards, parameters, strict=True):
        inner.param_groups[shard.group]["params"].append(parameter)
    if (take_shards := getattr(inner, "take_shards", None)) is not None:
        take_shards(shards, parameters)


def copy_group_settings(source: Optimizer, target: Optimizer) -> None:
    """Copies settings that a step, a scheduler or a script has changed, from ``source``'s groups to ``target``'s."""
    for group, other in zip(source.param_groups, target.param_groups, strict=True):
        other.update((name, value) for name, value in group.items() if name not in _OWN_SETTINGS)


def step_inner(optimizer: Optimizer, inner: Optimizer, args: Any, kwargs: Any, device: torch.device | None) -> None:
    """Lets the inner optimizer step with the present settings of the outer one, which calls the hooks.

    Args:
        device: the device of the step, if it differs from the outer optimizer's.
    """
    copy_group_settings(optimizer, inner)
    for name in ("grad_scale", "found_inf"):  # torch.amp.GradScaler sets them on fused optimizers
        if hasattr(optimizer, name):
            value = getattr(optimizer, name)
            setattr(inner, name, value.to(device=device) if isinstance(value, Tensor) else value)
        elif hasattr(inner, name):
            delattr(inner, name)
    step = type(inner).step
    getattr(step, "__wrapped__", step)(inner, *args, **kwargs)


def with_closure_called(args: Any, kwargs: Any) -> Any:
    """Returns the arguments of a step, after calling its closure once for both the outer and the inner optimizer.

    Args:
        args: the optimizer first.
    """
    closure = args[1] if len(args) > 1 else kwargs.get("closure")
    if not callable(closure):
        return args, kwargs
    with torch.enable_grad():
        result = closure()
    if len(args) > 1:
        return (args[0], lambda: result, *args[2:]), kwargs
    return args, {**kwargs, "closure": lambda: result}


class ShardedState(dict[Any, Any]):
    """Replaces the state of an optimizer whose inner optimizers, one on each tower, hold the state."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def _refuse(self, *_: Any) -> NoReturn:
        raise MirrorError(
            f"the state of {self._name} is sharded over the towers: take it from "
            "optimizer.state_dict(), which has all of it, and give it back by load_state_dict()"
        )

    def __bool__(self) -> bool:
        return True

    def _look(self, *args: Any) -> Any:
        if not compiler_traces():
            self._refuse()
        return iter(())  # torch.compile reads the state of an optimizer that it traces, and finds it empty

    __missing__ = __setitem__ = __delitem__ = __contains__ = __deepcopy__ = __reduce_ex__ = _refuse
    get = setdefault = update = pop = popitem = clear = _refuse  # type: ignore[assignment]
    __iter__ = keys = values = items = _look  # type: ignore[assignment]
