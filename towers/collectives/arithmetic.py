"""Reducing several towers' numbers to one, in an order that is always the same."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_IN_PLACE = {
    "sum": torch.Tensor.add_,
    "prod": torch.Tensor.mul_,
    "min": lambda total, part: torch.minimum(total, part, out=total),
    "max": lambda total, part: torch.maximum(total, part, out=total),
}


def reduce_into(total: Tensor, parts: Sequence[Tensor], op: str, *, scale: float = 1.0) -> None:
    """Set ``total`` to the reduction of ``parts``, from the first to the last, times ``scale``.

    Half-precision numbers are added and multiplied in float32 and rounded once, at the end.

    Args:
        total: may be the first of the parts.
        op: sum, min, max or prod.
    """
    combine = _IN_PLACE[op]
    first, *others = parts
    if total.dtype in (torch.float16, torch.bfloat16) and op in ("sum", "prod"):
        running = first.float()
    elif total is first:
        running = total
    else:
        running = total.copy_(first)
    for part in others:
        combine(running, part)
    if scale != 1.0:
        running.mul_(scale)
    if running is not total:
        total.copy_(running)
