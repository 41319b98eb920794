"""Random numbers that a script draws in ``run``: recorded, and made equal on any number of towers.

[Note: random numbers in a comparison] Dropout correctly draws other masks on N towers than on one, so it is left out.
The position of the draw is recorded, to find towers that share a random stream. Other random numbers in ``run`` (the
noise of a GAN or an autoencoder) are replaced by a slice of the numbers that one tower draws for the global batch. The
run on N towers knows the shapes of these numbers. A tensor of the same shape takes all numbers. A tensor that is
smaller in a single dimension, as the share is smaller than the batch, takes its slice of that dimension. A script whose
generators change in any other way cannot be compared.
"""

from __future__ import annotations

import linecache
import random
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from mirrored import seeds
from mirrored.shares import bounds
from mirrored.verification.trace import Event, Happened, Trace, digest_of
from towers.system import accelerator
from towers.system import tree as trees

_MOST_LINES = 100_000

DRAWING = {
    *("rand", "randn", "randint", "normal", "bernoulli", "multinomial", "poisson", "randperm"),
    *("rand_like", "randn_like", "randint_like"),
    *("uniform_", "normal_", "bernoulli_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_"),
}
"""The functions and methods of torch that draw from its generators, except dropout."""


def generator_state(device: torch.device) -> str:
    """Returns a digest of the state of torch's generators."""
    of_device = [accelerator.get_rng_state(device)] if device.type != "cpu" else []
    return digest_of(torch.cat([torch.get_rng_state(), *of_device]))


def other_generators() -> dict[str, int]:
    """Returns hashes of the states of Python's and NumPy's generators."""
    numpy = trees.leaves(np.random.get_state(legacy=False))
    words = tuple(value.tobytes() if isinstance(value, np.ndarray) else value for value in numpy)
    return {"Python's random": hash(random.getstate()), "numpy.random": hash(words)}


def states() -> tuple[str, dict[str, int]]:
    """Returns digests of the states of all generators of this process, except those of an accelerator."""
    return generator_state(torch.device("cpu")), other_generators()


def note_lines_that_draw(script: str, trace: Trace) -> None:
    """Notes each line of a script that draws random numbers, until ``sys.settrace(None)``.

    Lines that contain "seed" are left out. After many lines of Python code, no further ones are noted.
    """
    left, before, running, noted = _MOST_LINES, states(), 0, set[int]()

    def note(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left, before, running
        if frame.f_code.co_filename != script:
            return None
        left -= 1
        if left <= 0:
            sys.settrace(None)
        if (now := states()) != before:
            before = now
            if running not in noted and "seed" not in linecache.getline(script, running):
                noted.add(running)
                trace.events.append(Event(Happened.DRAW_ABOVE, "", running, 0))
        running = frame.f_lineno
        return note

    sys.settrace(note)


def shapes_of(one: Trace) -> dict[tuple[int, int], tuple[int, ...]]:
    """Returns the shapes of one tower's draws, as :attr:`Interventions.shapes`."""
    draws = (((i, j), draw) for i, call in enumerate(one.calls) for j, draw in enumerate(call.draws))
    return {key: draw.shape for key, draw in draws if not draw.dropout}


class GlobalDraw(NamedTuple):
    """Random numbers of the global batch, and the tower that receives a slice of them.

    Attributes:
        key: identifies this draw; equal on all towers and in both runs.
        shape: the shape of one tower's draw here; None if one tower does not draw.
        shares: the numbers of examples (this tower, all towers) in each batch in use.
        tower, towers: this tower's index, and the number of towers.
    """

    key: Sequence[object]
    shape: tuple[int, ...] | None
    shares: Sequence[tuple[int, int]]
    tower: int
    towers: int


def _slices_of(shape: Sequence[int], draw: GlobalDraw) -> tuple[slice, ...] | None:
    """Returns the slice of one tower's numbers for a tensor of this shape, or None if it is unknown."""
    if draw.shape is None or len(draw.shape) != len(shape):
        return None
    differing = [d for d, (full, local) in enumerate(zip(draw.shape, shape, strict=True)) if full != local]
    slices = [slice(None)] * len(shape)
    if not differing:
        return tuple(slices)
    if len(differing) > 1:
        return None
    [d] = differing
    full = draw.shape[d]
    for local, total in draw.shares:
        start, end = bounds(total, draw.towers, draw.tower)
        if total and end - start == local and full % total == 0 and shape[d] * total == full * local:
            times = full // total  # numbers per example, one example after another
            slices[d] = slice(start * times, end * times)
            return tuple(slices)
    return None


@torch.no_grad()
def draw_as_one_tower(
    name: str, result: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], draw: GlobalDraw
) -> bool:
    """Overwrites a function's draw with this tower's slice of one tower's draw for the whole batch.

    Args:
        name, args, kwargs: the call; its name is in ``DRAWING``.
        result: its result.

    Returns:
        Whether the numbers are certainly correct. They are not if one tower does not draw such a shape; then ``result``
        is unchanged. They are also not if it draws several numbers per example, whose order is a guess.
    """
    slices = _slices_of(result.shape, draw)
    if slices is None or draw.shape is None:
        return False
    totals = {total for _, total in draw.shares}
    certain = all(full == local or full in totals for full, local in zip(draw.shape, result.shape, strict=True))
    generator = torch.Generator(result.device).manual_seed(seeds.mix("verify", *draw.key))
    wide = torch.empty(draw.shape, dtype=result.dtype, device=result.device)
    if name in ("rand", "rand_like", "bernoulli"):
        wide.uniform_(generator=generator)
    elif name in ("randn", "randn_like", "normal"):
        wide.normal_(generator=generator)
    elif name in ("randint", "randint_like"):
        wide.random_(*_limits(args, kwargs), generator=generator)
    elif name.endswith("_") and not any(isinstance(value, Tensor) for value in (*args[1:], *kwargs.values())):
        getattr(wide, name)(*args[1:], **{**kwargs, "generator": generator})
    else:
        return False
    numbers = wide[slices]
    if name == "normal":
        mean, deviation = (*args[:2], *(kwargs[key] for key in ("mean", "std") if key in kwargs), 1.0)[:2]
        numbers = numbers * deviation + mean
    elif name == "bernoulli":
        numbers = numbers < [*args, *(kwargs[key] for key in ("input", "p") if key in kwargs)][-1]
    result.copy_(numbers)
    return certain


def _limits(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """Returns ``low`` and ``high`` of ``randint`` and ``randint_like``."""
    numbers = [value for value in args if isinstance(value, int)]
    high = kwargs["high"] if "high" in kwargs else numbers.pop()
    low = kwargs["low"] if "low" in kwargs else numbers.pop() if numbers else 0
    return int(low), int(high)
