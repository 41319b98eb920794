"""Collectives with gradients.

The results that one tower computes from an all-reduced value depend on every tower's input, so its gradient must return
to all towers. The gradient of an all-sum is the all-sum of the gradients. The gradient of an all-mean is their
all-mean. The gradient of an all-gather is the own slice of the all-summed gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from towers.collectives import values
from towers.collectives.communicator import Communicator
from towers.system import tree as trees


def all_reduce(comm: Communicator, op: str, tree: Any) -> Any:
    """Reduces like :func:`towers.collectives.values.reduce` without an axis; "sum" and "mean" are differentiable.

    Raises:
        RuntimeError: another operation on a tensor that requires a gradient.
    """
    if op not in ("sum", "mean") and any(map(_needs_gradient, trees.leaves(tree))):
        raise RuntimeError(f"all_reduce({op!r}) has no gradient; detach() the value, or use 'sum' or 'mean'")
    return _apart(tree, partial(_AllReduce.apply, comm, op), partial(values.reduce, comm, op))


def all_gather(comm: Communicator, tree: Any, axis: int = 0) -> Any:
    """Gathers like :func:`towers.collectives.values.gather`, and is differentiable."""
    return _apart(tree, partial(_AllGather.apply, comm, axis), partial(values.gather, comm, axis=axis))


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()


def _apart(tree: Any, tracked: Callable[..., tuple[Tensor, ...]], untracked: Callable[[Any], Any]) -> Any:
    """Returns ``tree`` with results of ``tracked`` for leaves that need a gradient, and of ``untracked`` for others."""
    leaves = list(trees.leaves(tree))
    with_gradient = [value for value in leaves if _needs_gradient(value)]
    if not with_gradient:
        return untracked(tree)
    others = [value for value in leaves if not _needs_gradient(value)]
    plain = iter(untracked(others) if others else ())
    differentiable = iter(tracked(*with_gradient))
    return trees.map_leaves(lambda value: next(differentiable if _needs_gradient(value) else plain), tree)


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, op: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.comm, ctx.op = comm, op
        return tuple(values.reduce(comm, op, list(tensors)))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        summed = _all_sum(ctx.comm, gradients)
        if ctx.op == "mean":
            summed = [gradient / ctx.comm.size for gradient in summed]
        return None, None, *summed


def _all_sum(comm: Communicator, gradients: Sequence[Tensor]) -> Sequence[Tensor]:
    """Returns the gradients' sums over all towers, differentiable in a backward with ``create_graph=True``."""
    if torch.is_grad_enabled():
        summed: tuple[Tensor, ...] = _AllReduce.apply(comm, "sum", *gradients)
        return summed
    return values.all_reduce_together(comm, "sum", gradients)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, axis: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.comm, ctx.axis = comm, axis
        gathered = tuple(values.gather(comm, list(tensors), axis))
        lengths = values.gather(comm, [torch.tensor([tensor.shape[axis]], device="cpu") for tensor in tensors])
        ctx.lengths = [column.tolist() for column in lengths]
        return gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        summed = _all_sum(ctx.comm, gradients)
        own = [
            gradient.split(lengths, dim=ctx.axis)[ctx.comm.index]
            for gradient, lengths in zip(summed, ctx.lengths, strict=True)
        ]
        return None, None, *own
