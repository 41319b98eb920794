"""Reducing several towers' numbers to one, in an order that is always the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_IN_PLACE = {
    "sum": torch.Tensor.add_,
    "mean": torch.Tensor.add_,
    "prod": torch.Tensor.mul_,
    "min": lambda total, part: torch.minimum(total, part, out=total),
    "max": lambda total, part: torch.maximum(total, part, out=total),
    "and": torch.Tensor.bitwise_and_,
    "or": torch.Tensor.bitwise_or_,
    "xor": torch.Tensor.bitwise_xor_,
}
OPERATIONS = tuple(_IN_PLACE)
"""What numbers can be reduced by."""


def reduce_into(total: Tensor, parts: Sequence[Tensor], op: str, *, scale: float = 1.0) -> None:
    """Set ``total`` to the reduction of ``parts``, from the first to the last, times ``scale``.

    Floating-point numbers of 16 bits and less are computed in float32 and rounded once, at the end.

    Args:
        total: may be the first of the parts.
        op: sum, mean (of integers: rounded towards zero), min, max, prod, and, or, xor.
    """
    combine = _IN_PLACE[op]
    dtype = total.dtype
    if dtype.itemsize == 1 and dtype.is_floating_point:  # torch has no arithmetic for these
        parts = [part.float() for part in parts]
    first, *others = parts
    if dtype in (torch.float16, torch.bfloat16) and op in ("sum", "mean", "prod"):
        running = first.float()
    elif total is first or first.dtype != dtype:
        running = first
    else:
        running = total.copy_(first)
    for part in others:
        combine(running, part)
    if op == "mean":
        exact = dtype.is_floating_point or dtype.is_complex
        running.div_(len(parts), rounding_mode=None if exact else "trunc")
    if scale != 1.0:
        running.mul_(scale)
    if running is not total:
        total.copy_(running)
