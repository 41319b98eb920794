"""Reduces and gathers values of user code: nested, of any dtype, possibly wrong on one tower.

Every call first announces a description of each tower's value. Wrong axes and differing operations, shapes, dtypes or
structures therefore raise one error on all towers. Small values on the CPU are sent in that same message.

[Note: gradients of collectives] The results that one tower computes from an all-reduced value depend on every tower's
input, so its gradient must return to all towers. The gradient of an all-sum is the all-sum of the gradients. The
gradient of an all-mean is their all-mean. The gradient of an all-gather is the own slice of the all-summed gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from towers.collectives.agreement import RepeatedCalls, announce_with_body
from towers.collectives.communicator import INLINE, Communicator, InStep, as_bytes, from_bytes
from towers.errors import DisagreementError
from towers.system import tree as trees

Axis = int | tuple[int, ...] | None

OPERATIONS = ("sum", "mean", "min", "max", "prod")


@dataclass(frozen=True)
class _Leaf:
    """One leaf as a tensor, and a function that converts the result to the leaf's own type."""

    tensor: Tensor
    give_back: Callable[[Tensor], Any]


def to_leaf(value: Any) -> _Leaf:
    """Returns a value as a leaf. Tensors stay tensors; results for numpy arrays and Python numbers are converted back.

    Raises:
        TypeError: any other value.
    """
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise TypeError(f"a tensor of layout {value.layout} cannot be reduced or gathered; call to_dense() first")
        return _Leaf(value.detach(), lambda t: t)
    if isinstance(value, (bool, int, float, complex)):
        kind = torch.int64 if isinstance(value, int) else torch.float64
        kind = torch.complex128 if isinstance(value, complex) else kind
        return _Leaf(torch.tensor(value, dtype=kind, device="cpu"), lambda t: t.item())
    if isinstance(value, (np.ndarray, np.generic)):
        return _Leaf(torch.from_numpy(np.array(value)), lambda t: t.numpy())
    raise TypeError(f"a value of type {type(value).__name__} cannot be reduced or gathered; use tensors or numbers")


def reduce(
    comm: Communicator,
    op: str,
    tree: Any,
    axis: Axis = None,
    call: str | None = None,
    calls: RepeatedCalls | None = None,
) -> Any:
    """Reduces a nested value over all towers. All towers get the result.

    Args:
        comm: the towers.
        op: one of ``OPERATIONS``.
        tree: its leaves are tensors, numpy arrays or Python numbers, of one dtype on all towers. Without ``axis``, they
            have one shape; with it, the sizes of the reduced dimensions may differ.
        axis: None reduces across towers only. An int or a tuple also reduces those dimensions of each tower's value
            ("mean" divides by the number of elements of all towers together).
        call: a description of the call for users. Default: the name and arguments of this function.
        calls: compares repeated reductions on accelerators, so that hosts do not wait for each other. None: hosts
            always wait.

    Returns:
        The structure of ``tree``. Sums and products of integers and booleans are int64. Their means have torch's
        default dtype, or float64 for scalars (float for Python numbers). All other values keep their dtype.

    Raises:
        DisagreementError, ValueError, TypeError: the same on all towers, before any value is sent.
    """
    local: list[Tensor] = []

    def describe(tensor: Tensor) -> list[Any]:
        reduced, count = _reduce_locally(op, tensor, axis)
        local.append(reduced)
        return [str(tensor.dtype), list(reduced.shape), count]

    call = call or f"reduce({op!r}, axis={axis})"
    # With an axis, the values of the towers may be of different sizes.
    leaves, described, bodies = _announce_leaves(comm, call, tree, describe, local, calls if axis is None else None)
    _check_equal(call, described, lambda leaf: leaf[:2])
    totals = _combine(comm, op, local) if bodies is None else _combine_here(op, local, bodies)
    results = []
    for i, (leaf, total) in enumerate(zip(leaves, totals, strict=True)):
        count = sum(row[i][2] for row in described) if op == "mean" else None
        results.append(leaf.give_back(_finish(op, leaf.tensor, total, count)))
    return _refill(tree, results)


def sum_of_some(comm: Communicator, call: str, value: Tensor | None) -> Tensor:
    """Returns the sum of the values of those towers that have one. All towers call it and get the sum.

    Args:
        call: a description of the call for users, the same on all towers.
        value: a floating-point scalar, of one dtype on all towers that have one; None on the others.

    Returns:
        The sum, of that dtype; a zero of the default dtype if no tower has a value.

    Raises:
        DisagreementError: on all towers, before any value is sent.
    """
    local, wire, body = None, torch.zeros(()), b""
    if value is not None:
        wire, _ = _reduce_locally("sum", value.detach(), None)
        if wire.device.type == "cpu":
            body = as_bytes(wire).numpy().tobytes()
        local = [str(value.dtype).removeprefix("torch."), bool(body)]
    replies = {tower: reply for tower, reply in enumerate(announce_with_body(comm, call, local, body)) if reply.details}
    if not replies:
        return torch.zeros((), device=comm.device)
    dtypes = {reply.details[0] for reply in replies.values()}
    if len(dtypes) > 1:
        places = ", ".join(f"{reply.details[0]} on tower {tower}" for tower, reply in replies.items())
        raise DisagreementError(f"{call}: the values are of different dtypes: {places}")
    dtype = getattr(torch, dtypes.pop())
    if value is None:
        wire, _ = _reduce_locally("sum", torch.zeros((), dtype=dtype, device=comm.device), None)
    if all(reply.details[1] for reply in replies.values()):
        [total] = _combine_here("sum", [wire.cpu()], [reply.body for reply in replies.values()])
    else:
        [total] = _combine(comm, "sum", [wire])
    return total.to(wire.device, dtype)


def gather(comm: Communicator, tree: Any, axis: int = 0) -> Any:
    """Concatenates every tower's value along ``axis``, in tower order. All towers get the result.

    Args:
        tree: its leaves are tensors or numpy arrays of one dtype; only the size along ``axis`` may differ.
        axis: the dimension to concatenate; negative numbers count from the end.

    Raises:
        DisagreementError, ValueError, TypeError: the same on all towers, before any value is sent.
    """

    def describe(tensor: Tensor) -> list[Any]:
        if tensor.dim() == 0:
            raise ValueError("a scalar cannot be gathered: unsqueeze it, or use reduce")
        _dimension(axis, tensor)
        return [str(tensor.dtype), list(tensor.shape)]

    call = f"gather(axis={axis})"
    leaves, described, _ = _announce_leaves(comm, call, tree, describe)

    def fixed(leaf: Any) -> Any:
        dtype, shape = leaf
        at = axis % max(1, len(shape))
        return [dtype, len(shape), shape[:at], shape[at + 1 :]]

    _check_equal(call, described, fixed)
    results = []
    with InStep(comm):
        for i, leaf in enumerate(leaves):
            shapes = [row[i][1] for row in described]
            results.append(leaf.give_back(concatenate(comm, leaf.tensor, shapes, axis % leaf.tensor.dim())))
    return _refill(tree, results)


def concatenate(comm: Communicator, tensor: Tensor, shapes: Sequence[Sequence[int]], axis: int) -> Tensor:
    """Concatenates tensors whose shapes are known to all towers. It moves bytes, so it supports every dtype."""
    sizes = [math.prod(shape) * tensor.element_size() for shape in shapes]
    if not any(sizes):
        return torch.cat([tensor.new_empty(list(shape)) for shape in shapes], dim=axis)
    packed = torch.zeros(max(sizes), dtype=torch.uint8, device=tensor.device)
    packed[: sizes[comm.index]] = as_bytes(tensor)
    gathered = comm.all_gather(packed)
    rows = zip(gathered, sizes, shapes, strict=True)
    return torch.cat([row[:size].view(tensor.dtype).view(list(shape)) for row, size, shape in rows], dim=axis)


def _dimension(axis: int, tensor: Tensor) -> int:
    if isinstance(axis, bool) or not isinstance(axis, int):
        raise TypeError(f"axis must be a whole number, not {axis!r}")
    if not -tensor.dim() <= axis < tensor.dim():
        raise ValueError(f"axis {axis} is out of range for a value of shape {tuple(tensor.shape)}")
    return axis % tensor.dim()


def _reduce_locally(op: str, tensor: Tensor, axis: Axis) -> tuple[Tensor, int]:
    """Returns this tower's contribution, in the dtype that is sent, and the number of elements behind each entry."""
    if op in ("min", "max") and tensor.is_complex():
        raise TypeError(f"{op} is not defined for complex values")
    if tensor.dtype == torch.uint64 and bool((tensor.view(torch.int64) < 0).any()):
        raise ValueError("whole numbers are reduced as int64, and one of these is 2**63 or more")
    if not tensor.is_floating_point() and not tensor.is_complex():
        wire = tensor.to(torch.int64)
    elif tensor.is_complex():
        wire = tensor.to(torch.promote_types(tensor.dtype, torch.complex64), copy=True)
    elif tensor.dtype in (torch.float32, torch.float64):
        wire = tensor.clone()
    else:
        wire = tensor.to(torch.float32)
    if axis is None:
        return wire.contiguous(), 1
    dimensions = axis if isinstance(axis, tuple) else (axis,)
    dims = sorted({_dimension(one, tensor) for one in dimensions})
    count = math.prod(tensor.shape[d] for d in dims)
    if op in ("sum", "mean"):
        return wire.sum(dim=dims), count
    for d in reversed(dims):
        if op == "prod":
            wire = wire.prod(dim=d)
        elif wire.shape[d] == 0:
            wire = _identity(op, wire.sum(dim=d))
        else:
            wire = wire.amin(dim=d) if op == "min" else wire.amax(dim=d)
    return wire, count


def _identity(op: str, like: Tensor) -> Tensor:
    """Returns the neutral element of min or max: the contribution of a tower without elements."""
    if like.is_floating_point():
        return torch.full_like(like, math.inf if op == "min" else -math.inf)
    limits = torch.iinfo(like.dtype)
    return torch.full_like(like, limits.max if op == "min" else limits.min)


def _finish(op: str, original: Tensor, total: Tensor, count: int | None) -> Tensor:
    integral = not original.is_floating_point() and not original.is_complex()
    if op == "mean":
        dtype = original.dtype
        if integral:
            dtype = torch.get_default_dtype() if original.dim() else torch.float64
            total = total.to(torch.float64)
        return (total / count if count else torch.zeros_like(total)).to(dtype)
    if integral and op in ("sum", "prod"):
        return total
    return total.to(original.dtype)


def _combine_here(op: str, local: list[Tensor], bodies: list[bytes]) -> list[Tensor]:
    """Reduces the towers' contributions that were part of the message."""
    combine: Any = {"sum": torch.sum, "mean": torch.sum, "prod": torch.prod, "min": torch.amin, "max": torch.amax}[op]
    towers = [_unpack(body, local) for body in bodies]
    return [combine(torch.stack(contributions), dim=0) for contributions in zip(*towers, strict=True)]


def _combine(comm: Communicator, op: str, local: list[Tensor]) -> list[Tensor]:
    """Reduces the towers' contributions, with one collective per dtype."""
    with InStep(comm):
        return all_reduce_together(comm, "sum" if op == "mean" else op, local)


def all_reduce_together(comm: Communicator, op: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Reduces several tensors, with one collective for each dtype and device among them."""

    def reduce_flat(flat: Tensor) -> None:
        not_numbers = flat.isnan() if op in ("min", "max") and flat.is_floating_point() else None
        comm.all_reduce(flat, op)
        if not_numbers is not None:  # backends treat NaN differently in min and max; torch's result is NaN
            anywhere = not_numbers.to(torch.uint8)
            comm.all_reduce(anywhere, "max")
            flat.masked_fill_(anywhere.bool(), math.nan)  # an index would make the host wait

    return together(tensors, reduce_flat)


def together(tensors: Sequence[Tensor], collective: Callable[[Tensor], object]) -> list[Tensor]:
    """Returns copies of tensors after ``collective`` has changed them, laid out flat, once per dtype and device."""
    results = list(tensors)
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for i, tensor in enumerate(tensors):
        groups.setdefault((tensor.dtype, tensor.device), []).append(i)
    for members in groups.values():
        flat = torch.cat([tensors[i].reshape(-1).resolve_conj().resolve_neg() for i in members])
        collective(flat)
        for i, piece in zip(members, flat.split([tensors[i].numel() for i in members]), strict=True):
            results[i] = piece.view(tensors[i].shape)
    return results


def _announce_leaves(
    comm: Communicator,
    call: str,
    tree: Any,
    describe: Callable[[Tensor], list[Any]],
    local: list[Tensor] | None = None,
    calls: RepeatedCalls | None = None,
) -> tuple[list[_Leaf], list[list[Any]], list[bytes] | None]:
    """Announces this tower's call to all towers.

    It raises on all towers if any tower cannot continue, or if they disagree.

    Returns the leaves, every tower's descriptions of them, and every tower's packed ``local`` values, or None if some
    were too large for the message.
    """
    details: dict[str, Any] = {"structure": trees.structure(tree)}
    leaves, body, problem = list[_Leaf](), b"", None
    try:
        leaves = [to_leaf(value) for value in trees.leaves(tree)]
        details["leaves"] = [describe(leaf.tensor) for leaf in leaves]
        small = local is not None and comm.are_few and all(tensor.device.type == "cpu" for tensor in local)
        if small and sum(tensor.nbytes for tensor in local or ()) <= INLINE:
            body = b"".join(as_bytes(tensor).numpy().tobytes() for tensor in local or ())
            details["inline"] = True
    except Exception as error:
        problem = error
    on_device = problem is not None or (leaves and all(leaf.tensor.device.type != "cpu" for leaf in leaves))
    if calls is None or not on_device:
        replies = announce_with_body(comm, call, details, body, problem)
    else:
        text = call
        if problem is None:
            values = ", ".join(f"{dtype.removeprefix('torch.')} {shape}" for dtype, shape, _ in details["leaves"])
            text = f"calls {call} of {details['structure']} ({values})"
        announced = calls.compare_by(text, lambda: announce_with_body(comm, call, details, body, problem))
        if announced is None:
            return leaves, [details["leaves"]] * comm.size, None
        replies = announced
    for tower, reply in enumerate(replies):
        if reply.details["structure"] != replies[0].details["structure"]:
            raise DisagreementError(
                f"the towers made different calls: tower {tower} {call} of {reply.details['structure']}, "
                f"tower 0 of {replies[0].details['structure']}"
            )
    inline = local is not None and all(reply.details.get("inline") for reply in replies)
    described = [reply.details["leaves"] for reply in replies]
    return leaves, described, [reply.body for reply in replies] if inline else None


def _unpack(data: bytes, like: list[Tensor]) -> list[Tensor]:
    pieces = from_bytes(data).split([tensor.nbytes for tensor in like])
    return [piece.clone().view(tensor.dtype).view(tensor.shape) for piece, tensor in zip(pieces, like, strict=True)]


def _check_equal(call: str, described: list[list[Any]], fixed: Callable[[Any], Any]) -> None:
    """Checks that the ``fixed`` part of each leaf's description is the same on all towers."""
    for tower, leaves in enumerate(described):
        for i, (leaf, first) in enumerate(zip(leaves, described[0], strict=True)):
            if fixed(leaf) != fixed(first):
                raise DisagreementError(
                    f"{call}: value {i} is {leaf[0]} of shape {tuple(leaf[1])} on tower {tower}, but "
                    f"{first[0]} of shape {tuple(first[1])} on tower 0"
                )


def _refill(tree: Any, results: list[Any]) -> Any:
    remaining = iter(results)
    return trees.map_leaves(lambda _: next(remaining), tree)


def differentiable_reduce(comm: Communicator, op: str, tree: Any) -> Any:
    """Reduces like :func:`reduce` without an axis; "sum" and "mean" are differentiable.

    Raises:
        RuntimeError: another operation on a tensor that requires a gradient.
    """
    if op not in ("sum", "mean") and any(map(_needs_gradient, trees.leaves(tree))):
        raise RuntimeError(f"all_reduce({op!r}) has no gradient; detach() the value, or use 'sum' or 'mean'")
    return _apart(tree, partial(_AllReduce.apply, comm, op), partial(reduce, comm, op))


def differentiable_gather(comm: Communicator, tree: Any, axis: int = 0) -> Any:
    """Gathers like :func:`gather`, and is differentiable."""
    return _apart(tree, partial(_AllGather.apply, comm, axis), partial(gather, comm, axis=axis))


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
        return tuple(reduce(comm, op, list(tensors)))

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
    return all_reduce_together(comm, "sum", gradients)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, comm: Communicator, axis: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.comm, ctx.axis = comm, axis
        gathered = tuple(gather(comm, list(tensors), axis))
        lengths = gather(comm, [torch.tensor([tensor.shape[axis]], device="cpu") for tensor in tensors])
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
