"""Collectives that gradients flow through.

What one tower computes from an all-reduced value depends on every tower's input, so its gradient has to
travel back to all of them: the gradient of an all-sum is the all-sum of the gradients, of an all-mean their
all-mean, of an all-gather the own slice of the all-summed gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from towers.collectives import values
from towers.collectives.communicator import Communicator
from towers.system import tree as trees


def all_reduce(comm: Communicator, op: str, tree: Any) -> Any:
    """As :func:`towers.collectives.values.reduce` without an axis; "sum" and "mean" are differentiable.

    Raises:
        RuntimeError: another operation on a tensor that requires a gradient.
    """
    tracked = _tracked(tree)
    if not tracked:
        return values.reduce(comm, op, tree)
    if op not in ("sum", "mean"):
        raise RuntimeError(f"all_reduce({op!r}) has no gradient; detach() the value, or use 'sum' or 'mean'")
    untracked = _untracked(tree)
    others = values.reduce(comm, op, untracked) if untracked else []
    return _fill_in(tree, _AllReduce.apply(comm, op, *tracked), others)


def all_gather(comm: Communicator, tree: Any, axis: int = 0) -> Any:
    """As :func:`towers.collectives.values.gather`, differentiable."""
    tracked = _tracked(tree)
    if not tracked:
        return values.gather(comm, tree, axis)
    untracked = _untracked(tree)
    others = values.gather(comm, untracked, axis) if untracked else []
    return _fill_in(tree, _AllGather.apply(comm, axis, *tracked), others)


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()


def _tracked(tree: Any) -> list[Tensor]:
    return [value for value in trees.leaves(tree) if _needs_gradient(value)]


def _untracked(tree: Any) -> list[Any]:
    return [value for value in trees.leaves(tree) if not _needs_gradient(value)]


def _fill_in(tree: Any, tracked: tuple[Tensor, ...], untracked: list[Any]) -> Any:
    with_gradient, without = iter(tracked), iter(untracked)
    return trees.map_leaves(lambda value: next(with_gradient) if _needs_gradient(value) else next(without), tree)


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
    """The gradients' sums over all towers; differentiable where a backward is to be (``create_graph=True``)."""
    if torch.is_grad_enabled():
        summed: tuple[Tensor, ...] = _AllReduce.apply(comm, "sum", *gradients)
        return summed
    return values.all_reduce_together(comm, "sum", gradients)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, axis: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.comm, ctx.axis = comm, axis
        joined = tuple(values.gather(comm, list(tensors), axis))
        lengths = values.gather(comm, [torch.tensor([tensor.shape[axis]], device="cpu") for tensor in tensors])
        ctx.lengths = [column.tolist() for column in lengths]
        return joined

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        summed = _all_sum(ctx.comm, gradients)
        own = [
            gradient.split(lengths, dim=ctx.axis)[ctx.comm.index]
            for gradient, lengths in zip(summed, ctx.lengths, strict=True)
        ]
        return None, None, *own
