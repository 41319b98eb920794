"""Random numbers in ``run`` that are those of the global batch, whatever the number of towers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mirrored import seeds
from mirrored.data.shares import bounds
from mirrored.verification.trace import Seen

DRAWING = {
    *("rand", "randn", "randint", "normal", "bernoulli", "multinomial", "poisson", "randperm"),
    *("rand_like", "randn_like", "randint_like"),
    *("uniform_", "normal_", "bernoulli_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_"),
}
"""The functions and methods of torch that draw from its generators, dropout aside."""

Shapes = Mapping[tuple[int, int], tuple[int, ...]]
"""What one tower has drawn in ``run``: by the numbers of the run and of the draw in it, the shape."""


def shapes_of(one: Seen) -> Shapes:
    """What one tower has drawn."""
    return {(i, j): draw.shape for i, run in enumerate(one.runs) for j, draw in enumerate(run.draws)}


class Place(NamedTuple):
    """Which numbers are to be drawn.

    Attributes:
        draw: what tells this draw from others; equal on all towers and in both runs.
        shape: of what one tower draws here; None where it draws nothing.
        shares: (this tower's, all towers') examples of each batch at hand.
        tower, towers: this tower's index, and their number.
    """

    draw: Sequence[object]
    shape: tuple[int, ...] | None
    shares: Sequence[tuple[int, int]]
    tower: int
    towers: int


def _part_of(shape: Sequence[int], place: Place) -> tuple[slice, ...] | None:
    """The part of one tower's numbers that a tensor of this shape takes; None where that cannot be told.

    A tensor of one tower's shape takes them all. One that is smaller in a single dimension, as the share is smaller
    than the batch, is cut there.
    """
    if place.shape is None or len(place.shape) != len(shape):
        return None
    differing = [d for d, (whole, own) in enumerate(zip(place.shape, shape, strict=True)) if whole != own]
    if not differing:
        return (slice(None),) * len(shape)
    if len(differing) > 1:
        return None
    [d] = differing
    for local, total in place.shares:
        start, end = bounds(total, place.towers, place.tower)
        if (
            total
            and end - start == local
            and place.shape[d] % total == 0
            and shape[d] * total == place.shape[d] * local
        ):
            times = place.shape[d] // total  # numbers for each example, one example after the other
            return (*(slice(None),) * d, slice(start * times, end * times), *(slice(None),) * (len(shape) - d - 1))
    return None


@torch.no_grad()
def draw_as_one_tower(name: str, result: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], place: Place) -> bool:
    """Overwrite what a function has drawn by this tower's part of what one tower draws for the whole batch.

    Args:
        name, args, kwargs: the call; its name is in ``DRAWING``.
        result: what it has returned.

    Returns:
        Whether these are the right numbers for certain: not where one tower draws nothing alike, and ``result`` is as
        it was, nor where it draws several for each example, whose order is a guess.
    """
    part = _part_of(result.shape, place)
    if part is None or place.shape is None:
        return False
    shape = place.shape
    totals = {total for _, total in place.shares}
    certain = all(whole == own or whole in totals for whole, own in zip(shape, result.shape, strict=True))
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
        return certain
    elif name == "bernoulli" and isinstance(args[0], Tensor):
        result.copy_(wide.uniform_(generator=generator)[part] < args[0])
        return certain
    elif name.endswith("_") and not any(isinstance(value, Tensor) for value in (*args[1:], *kwargs.values())):
        getattr(wide, name)(*args[1:], **{**kwargs, "generator": generator})
    else:
        return False
    result.copy_(wide[part])
    return certain


def _limits(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """``low`` and ``high`` of ``randint`` and ``randint_like``."""
    numbers = [value for value in args if isinstance(value, int)]
    high = kwargs["high"] if "high" in kwargs else numbers.pop()
    low = kwargs["low"] if "low" in kwargs else numbers.pop() if numbers else 0
    return int(low), int(high)
