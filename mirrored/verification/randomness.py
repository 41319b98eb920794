"""Random numbers in ``run`` that are those of the global batch, whatever the number of towers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mirrored import seeds
from mirrored.data.shares import bounds

DRAWING = {
    *("rand", "randn", "randint", "normal", "bernoulli", "multinomial", "poisson", "randperm"),
    *("rand_like", "randn_like", "randint_like"),
    *("uniform_", "normal_", "bernoulli_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_"),
}
"""The functions and methods of torch that draw from its generators, dropout aside."""


class Place(NamedTuple):
    """Which numbers are to be drawn.

    Attributes:
        draw: what tells this draw from others; equal on all towers and in both runs.
        share: (this tower's, all towers') examples.
        tower, towers: this tower's index, and their number.
    """

    draw: Sequence[object]
    share: tuple[int, int]
    tower: int
    towers: int


@torch.no_grad()
def draw_as_one_tower(name: str, result: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], place: Place) -> bool:
    """Overwrite what a function has drawn by this tower's part of what one tower would draw for the whole batch.

    A tensor with as many entries as the share has examples gets its part, any other the same on all towers.

    Args:
        name, args, kwargs: the call; its name is in ``DRAWING``.
        result: what it has returned.

    Returns:
        Whether that is possible; else ``result`` is as it was.
    """
    local, total = place.share
    if not total or result.dim() == 0:
        return False
    shape, part = list(result.shape), slice(None)
    if shape[0] == local:
        start, end = bounds(total, place.towers, place.tower)
        if end - start != local:
            return False
        shape[0], part = total, slice(start, end)
    generator = torch.Generator(result.device).manual_seed(seeds.mix("verify", *place.draw))
    wide = torch.empty(shape, dtype=result.dtype, device=result.device)
    if name in ("rand", "rand_like"):
        wide.uniform_(generator=generator)
    elif name in ("randn", "randn_like"):
        wide.normal_(generator=generator)
    elif name in ("randint", "randint_like"):
        wide.random_(*_limits(args, kwargs), generator=generator)
    elif name == "normal":
        mean, deviation = (*args[:2], *(kwargs[key] for key in ("mean", "std") if key in kwargs), 1.0)[:2]
        result.copy_(wide.normal_(generator=generator)[part] * deviation + mean)
        return True
    elif name == "bernoulli" and isinstance(args[0], Tensor):
        result.copy_(wide.uniform_(generator=generator)[part] < args[0])
        return True
    elif name.endswith("_") and not any(isinstance(value, Tensor) for value in (*args[1:], *kwargs.values())):
        getattr(wide, name)(*args[1:], **{**kwargs, "generator": generator})
    else:
        return False
    result.copy_(wide[part])
    return True


def _limits(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """``low`` and ``high`` of ``randint`` and ``randint_like``."""
    numbers = [value for value in args if isinstance(value, int)]
    high = kwargs["high"] if "high" in kwargs else numbers.pop()
    low = kwargs["low"] if "low" in kwargs else numbers.pop() if numbers else 0
    return int(low), int(high)
