"""Checks and conversions of the arguments of c10d: tensors, their device and memory layout, and the operation."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from towers.collectives.arithmetic import check_reducible
from towers.errors import ArgumentError
from towers.system import tree as trees
from towers.system.tensors import contiguous, copy_back

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
_Method = TypeVar("_Method", bound=Callable[..., Any])


def of_any_device(method: _Method) -> _Method:
    """Decorates a method so that calls with tensors that are not on the CPU are passed to ``self.other_devices()``."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        device = next((value.device for value in trees.leaves(args) if isinstance(value, Tensor)), None)
        if device is None or device.type == "cpu":
            return method(self, *args, **kwargs)
        return getattr(self.other_devices(device), method.__name__)(*args, **kwargs)

    return cast(_Method, call)


def operation(call: str, opts: Any, *tensors: Tensor) -> str:
    """Returns the name of the reduction in ``opts`` (options, or an operation).

    Raises:
        ArgumentError: it does not exist, or not for the dtype of a tensor.
    """
    op = dist.ReduceOp.SUM if opts is None else getattr(opts, "reduceOp", opts)
    kind = getattr(op, "op", op)
    name = _OPERATIONS.get(kind)
    known = str(kind).rpartition(".")[2]
    if name is None:
        raise ArgumentError(
            f"{call}: ReduceOp.{known} is not supported; there are SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR and BXOR"
        )
    for tensor in tensors:
        try:
            check_reducible(name, tensor.dtype)
        except ArgumentError:
            raise ArgumentError(f"{call}: cannot use ReduceOp.{known} with {tensor.dtype}") from None
    return name


def single(call: str, tensors: Tensor | Sequence[Tensor]) -> Tensor:
    """Returns the only tensor of ``tensors``.

    Raises:
        ArgumentError: there are more, or it is not dense.
    """
    if isinstance(tensors, Tensor):
        tensors = [tensors]
    if len(tensors) != 1:
        raise ArgumentError(f"{call}: takes a single tensor, not {len(tensors)}")
    (tensor,) = checked(call, tensors)
    return tensor


def checked(call: str, tensors: Sequence[Tensor], like: Tensor | None = None, count: int | None = None) -> list[Tensor]:
    """Returns ``tensors`` as a list.

    Args:
        like: a tensor whose dtype they must have.
        count: their required number.

    Raises:
        ArgumentError: their dtype or number is different, or they are not dense.
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
    """Checks the number of elements of a tensor.

    Raises:
        ArgumentError: it has more or fewer than ``expected``.
    """
    if tensor.numel() != expected:
        raise ArgumentError(f"{call}: a tensor has {tensor.numel()} elements where {expected} are needed")


def split(call: str, tensor: Tensor, sizes: Sequence[int] | None, count: int) -> list[Tensor]:
    """Splits ``tensor`` along its first dimension into ``count`` chunks, of the lengths ``sizes`` or of one length.

    Raises:
        ArgumentError: it cannot be split like that.
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


def signature(*tensors: Tensor) -> str:
    """Returns, as text, numbers of elements and dtypes, which must be the same on all ranks."""
    return ", ".join(f"{tensor.numel()} {str(tensor.dtype)[6:]}" for tensor in tensors)


@contextlib.contextmanager
def outputs_of(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yields contiguous tensors like ``tensors``, to which their final values are copied at the end of the context."""
    dense = [contiguous(tensor) for tensor in tensors]
    yield dense
    for filled, tensor in zip(dense, tensors, strict=True):
        copy_back(filled, tensor)
