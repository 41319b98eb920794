"""Reducing several towers' numbers to one, in an order that is always the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "prod": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}


def reduce_into(total: Tensor, parts: Sequence[Tensor], op: str, *, scale: float = 1.0) -> None:
    """Set ``total`` to the reduction of ``parts``, from the first to the last, times ``scale``.

    Half-precision numbers are added and multiplied in float32 and rounded once, at the end.

    Args:
        total: may be one of the parts (the same object).
        op: sum, min, max or prod.
    """
    combine = _COMBINE[op]
    first, *others = parts
    if total.dtype in (torch.float16, torch.bfloat16) and op in ("sum", "prod"):
        running = first.float()
    elif not others:
        running = total if total is first else total.copy_(first)
    else:
        second, *others = others
        running = torch.empty_like(total) if any(part is total for part in others) else total
        combine(first, second, out=running)
    for part in others:
        combine(running, part, out=running)
    if scale != 1.0:
        running.mul_(scale)
    if running is not total:
        total.copy_(running)
