"""What c10d hands over, checked: which tensors, contiguous, and which operation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from towers.errors import ArgumentError

_OPERATIONS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "mean",
    dist.ReduceOp.PRODUCT: "prod",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.BAND: "and",
    dist.ReduceOp.BOR: "or",
    dist.ReduceOp.BXOR: "xor",
}
_WITHOUT_ARITHMETIC = (torch.uint16, torch.uint32, torch.uint64)


def operation(call: str, opts: Any, tensor: Tensor) -> str:
    """The name of the reduction that ``opts`` (options, or an operation) asks for.

    Raises:
        ArgumentError: it is not there, or not for this dtype.
    """
    op = dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
    kind = getattr(op, "op", op)
    name = _OPERATIONS.get(kind)
    known = str(kind).rpartition(".")[2]
    if name is None:
        raise ArgumentError(
            f"{call}: ReduceOp.{known} is not supported; there are SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR and BXOR"
        )
    dtype = tensor.dtype
    inexact = dtype.is_floating_point or dtype.is_complex
    if (
        (name in ("and", "or", "xor") and inexact)
        or (name in ("min", "max") and dtype.is_complex)
        or (name == "mean" and dtype == torch.bool)
        or dtype in _WITHOUT_ARITHMETIC
    ):
        raise ArgumentError(f"{call}: cannot use ReduceOp.{known} with {dtype}")
    return name


def one(call: str, tensors: Tensor | Sequence[Tensor]) -> Tensor:
    """The only one of ``tensors``.

    Raises:
        ArgumentError: there are more, or it is not what collectives take.
    """
    if isinstance(tensors, Tensor):
        tensors = [tensors]
    if len(tensors) != 1:
        raise ArgumentError(f"{call}: takes a single tensor, not {len(tensors)}")
    (tensor,) = checked(call, tensors)
    return tensor


def checked(call: str, tensors: Sequence[Tensor], like: Tensor | None = None, count: int | None = None) -> list[Tensor]:
    """``tensors``, which are dense.

    Args:
        like: whose dtype they must have.
        count: how many they must be.

    Raises:
        ArgumentError: they are not.
    """
    if count is not None and len(tensors) != count:
        raise ArgumentError(f"{call}: takes one tensor for each of the {count} ranks, not {len(tensors)}")
    for tensor in tensors:
        if tensor.layout != torch.strided:
            raise ArgumentError(f"{call}: takes dense tensors, not {tensor.layout}")
        if like is not None and tensor.dtype != like.dtype:
            raise ArgumentError(f"{call}: tensors of {like.dtype} and of {tensor.dtype} in one call")
    return list(tensors)


def check_numel(call: str, tensor: Tensor, expected: int) -> None:
    """See that a tensor has as many elements as it must.

    Raises:
        ArgumentError: it has more or fewer.
    """
    if tensor.numel() != expected:
        raise ArgumentError(f"{call}: a tensor has {tensor.numel()} elements where {expected} are needed")


def split(call: str, tensor: Tensor, sizes: Sequence[int] | None, count: int) -> list[Tensor]:
    """``tensor`` in ``count`` parts along its first dimension: as long as ``sizes`` says, or all alike.

    Raises:
        ArgumentError: it cannot be split so.
    """
    rows = tensor.shape[0] if tensor.dim() else 1
    if not sizes:
        if rows % count:
            raise ArgumentError(f"{call}: the first dimension, {rows}, cannot be divided among {count} ranks")
        sizes = [rows // count] * count
    if len(sizes) != count:
        raise ArgumentError(f"{call}: {len(sizes)} split sizes for {count} ranks")
    if sum(sizes) != rows:
        raise ArgumentError(f"{call}: the split sizes {list(sizes)} do not sum to the first dimension, {rows}")
    return list(tensor.split(list(sizes)))


def like(*tensors: Tensor) -> str:
    """What must be the same of tensors on all ranks, in words."""
    return ", ".join(f"{tensor.numel()} {str(tensor.dtype)[6:]}" for tensor in tensors)


def some(tensors: Sequence[Tensor]) -> bool:
    """Whether there are any elements in them."""
    return any(tensor.numel() for tensor in tensors)


def plain(tensor: Tensor) -> Tensor:
    """The tensor, or a copy where its elements do not lie in memory one after the other, as they are."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


@contextlib.contextmanager
def changed(tensor: Tensor) -> Iterator[Tensor]:
    """A contiguous tensor with the values of ``tensor``; what it holds at the end, ``tensor`` will."""
    dense = plain(tensor)
    yield dense
    _put_back(dense, tensor)


@contextlib.contextmanager
def written(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Contiguous tensors like ``tensors``, of any values; what they hold at the end, ``tensors`` will."""
    dense = [
        tensor.detach()
        if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        for tensor in tensors
    ]
    yield dense
    for filled, tensor in zip(dense, tensors, strict=True):
        _put_back(filled, tensor)


def _put_back(dense: Tensor, tensor: Tensor) -> None:
    if dense.data_ptr() != tensor.data_ptr() or tensor.is_conj() or tensor.is_neg():
        tensor.detach().copy_(dense)
