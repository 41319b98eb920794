"""Reductions of several towers' numbers to one, always in the same order; and the chunk that each tower reduces."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from towers.errors import ArgumentError

CHUNK_ALIGNMENT = 256
"""Bytes. Towers' chunks of a buffer start at multiples of it, and so should the tensors in the buffer.

It is more than a cache line, so that a kernel's vectors of up to 64 bytes, unrolled four times, traverse a tensor's
chunk as they traverse the whole tensor. Then an optimizer that updates the chunk computes the same bits.
"""

_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "mean": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
}


@functools.cache
def check_reducible(op: str, dtype: torch.dtype) -> None:
    """Checks that :func:`reduce_into` supports an operation, before any tower waits for the result.

    Raises:
        ArgumentError: there is no such operation, or none for ``dtype`` (``max`` of complex numbers, …).
    """
    operands = [torch.zeros(1, dtype=dtype, device="cpu") for _ in range(2)]
    try:
        reduce_into(operands[0], operands, op)
    except (RuntimeError, TypeError, KeyError) as error:  # the type depends on torch's version
        raise ArgumentError(f"{op} of {dtype} cannot be had: {error}") from None


def reduce_into(total: Tensor, operands: Sequence[Tensor], op: str, *, scale: float = 1.0) -> None:
    """Sets ``total`` to the reduction of ``operands``, from the first to the last, times ``scale``.

    Floating-point numbers of 16 bits and less are computed in float32 and rounded once, at the end.

    Args:
        total: may be one of the operands (the same object).
        op: sum, mean (of integers: rounded towards zero), min, max, prod, and, or, xor.
    """
    combine = _COMBINE[op]
    dtype = total.dtype
    if dtype.itemsize == 1 and dtype.is_floating_point:  # torch has no arithmetic for these
        operands = [operand.float() for operand in operands]
    first, *others = operands
    if dtype in (torch.float16, torch.bfloat16) and op in ("sum", "mean", "prod"):
        running = first.float()
    elif first.dtype != dtype:
        running = first
    elif not others:
        running = total if total is first else total.copy_(first)
    else:
        second, *others = others
        running = torch.empty_like(total) if any(operand is total for operand in others) else total
        combine(first, second, out=running)
    for operand in others:
        combine(running, operand, out=running)
    if op == "mean":
        exact = dtype.is_floating_point or dtype.is_complex
        running.div_(len(operands), rounding_mode=None if exact else "trunc")
    if scale != 1.0:
        running.mul_(scale)
    if running is not total:
        total.copy_(running)


def add_by_tree(total: Tensor, operands: Sequence[Tensor]) -> None:
    """Sets ``total`` to the sum of ``operands``, added in pairs, then pairs of pairs; every sum is rounded.

    So the sum of 2^k operands has the same bits as the sum of the sums of their halves, quarters, … that are added in
    the same way.

    Args:
        total: may be one of the operands (the same object).
    """
    level = list(operands)
    while len(level) > 2:
        odd = level[len(level) // 2 * 2 :]
        level = [torch.add(left, right) for left, right in zip(level[::2], level[1::2], strict=False)] + odd
    if len(level) == 2:
        torch.add(level[0], level[1], out=total)
    elif level[0] is not total:
        total.copy_(level[0])


def chunk_of(numel: int, itemsize: int, towers: int, tower: int) -> tuple[int, int]:
    """Returns the start and the end, in elements, of the chunk of a flat buffer that ``tower`` reduces.

    Args:
        numel: elements of the buffer.
        itemsize: bytes of an element.
    """
    size = chunk_numel(numel, itemsize, towers)
    return min(numel, size * tower), min(numel, size * (tower + 1))


def chunk_numel(numel: int, itemsize: int, towers: int) -> int:
    """Returns the elements of every chunk of :func:`chunk_of` except the last ones, which may be shorter."""
    step = max(1, CHUNK_ALIGNMENT // itemsize)
    return -(-numel // (towers * step)) * step
