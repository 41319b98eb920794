"""The division of an optimizer's parameters into shards, and the inner optimizer, which updates those of one tower.

Every tower updates its chunk of each bucket, and its rows of tables.

[Note: the optimizer stays the script's] The inner optimizer has the same class and settings. The script's own ``step``
runs with empty groups, between its hooks. So schedulers, scalers, hooks, ``add_param_group`` and ``load_state_dict``
work as usual, and only ``optimizer.state[p]`` is refused. The inner optimizer is made at the first step, so an
optimizer may be created in the scope or later. Shards are the chunks in which the buckets are reduced, so any optimizer
over any of the parameters fits them.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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

from towers.collectives.arithmetic import chunk_of
from towers.errors import MirrorError
from towers.gradients.buckets import DenseSlot, Slot
from towers.system.torch_private import compiler_traces

_PIECE_BYTES = 2**19
"""An optimizer traverses a parameter several times. On a CPU, a piece of this size stays in the cache between them."""


@dataclass(frozen=True)
class Shard:
    """A piece of a tower's chunk of one parameter.

    Attributes:
        group: index of the optimizer's parameter group.
        slot: the parameter's.
        start, end: the range of its elements, in memory order.
        whole: whether the parameter is not divided, and every tower updates all of it.
    """

    group: int
    slot: Slot
    start: int
    end: int
    whole: bool = False

    @property
    def parameter(self) -> Tensor:
        parameter = self.slot.parameter()
        assert parameter is not None  # the optimizer holds it
        return parameter

    @property
    def nbytes(self) -> int:
        return (self.end - self.start) * self.slot.dtype.itemsize

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the shard of a tensor with the parameter's shape and strides: a flat view, or the tensor itself."""
        if self.whole or tensor.dim() == 0:
            return tensor.detach()
        return tensor.as_strided((self.end - self.start,), (1,), tensor.storage_offset() + self.start)

    def is_at(self, place: Tensor, tensor: Tensor) -> bool:
        """Returns whether ``place`` is the result of :meth:`of` for ``tensor``."""
        offset = 0 if self.whole else self.start * self.slot.dtype.itemsize
        return place.data_ptr() == tensor.data_ptr() + offset

    def gradient(self) -> Tensor | None:
        """Returns the shard of the parameter's gradient, or None."""
        parameter, gradient = self.parameter, self.slot.gradient
        if gradient is not None and not gradient.is_sparse and gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)
        return None if gradient is None else self.of(gradient)


@dataclass(frozen=True)
class RowShard(Shard):
    """Rows ``start`` to ``end`` of a parameter with sparse gradients."""

    def of(self, tensor: Tensor) -> Tensor:
        if tensor.is_sparse:
            return torch.narrow_copy(tensor.coalesce(), 0, self.start, self.end - self.start)
        return tensor.detach()[self.start : self.end] if tensor.dim() else tensor.detach()


def cut_rows(slot: Slot, towers: int) -> list[int]:
    """Returns the rows of a table at which the towers' shards start, and the end of the last one.

    For a parameter that buckets split, it returns [0].

    [Note: cuts between rows] The used rows are distributed as unevenly as words are, and similarly in all steps. So the
    rows that the present gradient has are split into equal parts. Every n-th row would be as even, but torch adds a
    sparse gradient one by one to rows with gaps between them.
    """
    if isinstance(slot, DenseSlot):
        return [0]
    rows, gradient, nths = slot.shape[0], slot.gradient, torch.arange(1, towers, device="cpu")
    cuts = nths * rows // towers
    if gradient is not None and gradient.is_sparse and (used := gradient.coalesce().indices()[0]).numel() >= towers:
        cuts = used.cpu()[nths * used.numel() // towers]
    return [0, *cuts.tolist(), rows]


def shards_of(
    tower: int, groups: Sequence[Sequence[Slot]], cuts: Mapping[Slot, Sequence[int]], towers: int
) -> list[Shard]:
    """Returns the shards of one tower, in the order of the optimizer's parameters.

    Args:
        groups: the optimizer's.
        cuts: :func:`cut_rows` of the parameters to divide.
    """
    shards: list[Shard] = []
    for group, slots in enumerate(groups):
        for slot in slots:
            if slot not in cuts:
                shards.append(Shard(group, slot, 0, slot.shape.numel(), whole=True))
                continue
            if not isinstance(slot, DenseSlot):
                shards.append(RowShard(group, slot, cuts[slot][tower], cuts[slot][tower + 1]))
                continue
            low, high = chunk_of(slot.bucket.numel, slot.bucket.dtype.itemsize, towers, tower)
            real = 2 if slot.dtype.is_complex else 1
            start = (max(low, slot.start) - slot.start) // real
            end = (min(high, slot.start + slot.numel) - slot.start) // real
            step = _PIECE_BYTES // slot.dtype.itemsize if slot.bucket.device.type == "cpu" else max(end - start, 1)
            shards += [Shard(group, slot, at, min(at + step, end)) for at in range(start, end, step)]
    return shards


def ranges(shards: Sequence[Shard]) -> dict[int, list[tuple[int, int]]]:
    """Returns the ranges that shards cover, by the index of the bucket, in as few pieces as possible."""
    covered: dict[int, list[tuple[int, int]]] = {}
    dense = [(shard.slot, shard) for shard in shards if isinstance(shard.slot, DenseSlot)]
    for slot, shard in sorted(dense, key=lambda pair: (pair[0].bucket.index, pair[0].start, pair[1].start)):
        pieces = covered.setdefault(slot.bucket.index, [])
        real = 2 if slot.dtype.is_complex else 1
        start, end = slot.start + real * shard.start, slot.start + real * shard.end
        # Between them may be only the gap that aligns the second.
        if pieces and start - pieces[-1][1] < slot.bucket.alignment:
            start, _ = pieces.pop()
        pieces.append((start, end))
    return covered


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
