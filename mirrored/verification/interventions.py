"""What a run changes in a script: to make runs comparable, to measure rounding, or to prove that a cause is the cause.

[Note: random numbers in a comparison] Dropout draws other masks on N towers than on one, as it should, so it is left
out; the place where it would have drawn is recorded, to find towers that share a stream. Other random numbers in
``run`` (the noise of a GAN or an autoencoder) are replaced by this tower's part of the numbers that one tower draws for
the global batch. The run on N towers is told the shapes of those: a tensor of the same shape takes all numbers, one
that is smaller in a single dimension, as the share is smaller than the batch, takes its part of that dimension. A
script whose generators move in any other way cannot be compared.

[Note: rounding is measured] A ReLU that is active in one run only, or Adam, amplifies the last bit of a number, in some
models within two steps, so no fixed tolerance fits. Where a difference is beyond the tolerance, a further run on one
tower moves the results of all modules by rounding errors; only differences well above the effect of that count.
Learning rates and integers have no rounding errors.
"""

from __future__ import annotations

import dataclasses
import enum
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mirrored import seeds
from mirrored.context import ReplicaContext
from mirrored.shares import bounds
from mirrored.verification.loss_graph import MOST_TERMS
from mirrored.verification.trace import Form, Padding, Trace, digest_of
from towers.system import accelerator
from towers.system import tree as trees


class LossFactor(enum.Enum):
    """The factor by which a tower multiplies its losses, in the order of trials; the value is its name in reports."""

    NONE = "one"
    SHARE = "towers · its examples / all examples"
    DIVISOR = "towers · what it is divided by / the sum of that over the towers"
    TOWERS = "the number of towers"
    BOTH = "towers · towers · its examples / all examples"
    INVERSE = "all examples / its examples"  # of a sum in Keras' fit, which weighs by examples

    def of(self, towers: int, local: int, total: int) -> float:
        """The factor on one tower in one step; ``DIVISOR`` has a factor for each summand (:func:`divisor_factors`)."""
        if self is LossFactor.INVERSE:
            return total / local if local else 1.0
        share = towers * local / total if total and self in (LossFactor.SHARE, LossFactor.BOTH) else 1.0
        return share * (towers if self in (LossFactor.TOWERS, LossFactor.BOTH) else 1)


@dataclasses.dataclass(frozen=True)
class Interventions:
    """What is changed in a run.

    Attributes:
        loss: every loss is multiplied by this before its backward.
        terms: the summands of the loss to which that applies; empty: the whole loss.
        global_statistics: batch norm layers in training mode take the statistics of all towers' examples.
        rates: learning rates of each step's parameter groups, which replace the script's.
        padding: what one tower's batches look like, by the numbers of the call of ``run`` and of the tensor among its
            arguments; shares are padded alike.
        skip_local_changes: changes of gradients that are not averaged yet are left out.
        shapes: what random numbers one tower has drawn: their shapes, by the numbers of the call of ``run`` and of the
            draw in it; None on one tower.
        rounding: the results of modules are moved by rounding errors.
        recorded: whether anything is recorded; otherwise the script only ends when it has made the steps.
    """

    loss: LossFactor = LossFactor.NONE
    terms: frozenset[int] = frozenset()
    global_statistics: bool = False
    rates: tuple[tuple[float, ...], ...] = ()
    padding: Mapping[tuple[int, int], Form] = dataclasses.field(default_factory=dict)
    skip_local_changes: bool = False
    shapes: Mapping[tuple[int, int], tuple[int, ...]] | None = None
    rounding: bool = False
    recorded: bool = True


def divisor_factors(replica: ReplicaContext, divisors: Sequence[float]) -> dict[int, float]:
    """The factor for each summand of a loss that makes the mean of the towers' means the mean over all values.

    All towers call it.

    Args:
        divisors: by what this tower's summands are divided; the same number of them on all towers.
    """
    padded = torch.zeros(MOST_TERMS, dtype=torch.float64)
    padded[: len(divisors)] = torch.tensor(divisors, dtype=torch.float64)
    totals: Any = replica.all_reduce("sum", padded)
    towers = replica.num_replicas_in_sync
    return {i: towers * local / total if (total := float(totals[i])) else 1.0 for i, local in enumerate(divisors)}


# -- padding ---------------------------------------------------------------------------------------------


def form_of(tensor: Tensor) -> Form:
    """The form of a tensor; without paddings where it has a single dimension or its layout is not dense."""
    tensor = tensor.detach()
    dense = tensor.layout == torch.strided and not tensor.is_complex() and tensor.dim() > 1 and tensor.numel()
    paddings = [_padding(tensor, d) if dense and tensor.shape[d] > 1 else None for d in range(tensor.dim())]
    return Form(tuple(tensor.shape), tuple(paddings))


def _padding(tensor: Tensor, dim: int) -> Padding:
    """Most examples are shorter than the longest, so they are padded with the most frequent number at an end.

    An end where all entries of a mask are alike has no padding.
    """
    ends = []
    for place in (0, -1):
        entries = tensor.select(dim, place).flatten().to("cpu", torch.float64)
        number = float(entries.mode().values)
        count = int((entries == number).sum())
        ends.append((count if count < len(entries) else 0, number))
    (firsts, first), (lasts, last) = ends
    return Padding(True, first) if firsts > lasts else Padding(False, last)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in a nested value; those of the arguments of ``run`` are numbered in this order."""
    return (leaf for leaf in trees.leaves(value) if isinstance(leaf, Tensor))


def pad(arguments: Any, call: int, forms: Mapping[tuple[int, int], Form], shares: Sequence[tuple[int, int]]) -> Any:
    """The arguments of ``run``, with shares padded as one tower's batch is.

    Args:
        call: number of the call of ``run``.
        forms: the same as :attr:`Interventions.padding`.
        shares: how many examples (this tower, all towers) have in each batch at hand.
    """
    numbers = iter(range(sum(1 for _ in tensors_of(arguments))))

    def padded(leaf: Any) -> Any:
        form = forms.get((call, next(numbers))) if isinstance(leaf, Tensor) else None
        return leaf if form is None else _padded(leaf, form, shares)

    return trees.map_leaves(padded, arguments)


def padded_dims(shape: Sequence[int], form: Form, shares: Sequence[tuple[int, int]]) -> list[int]:
    """The dimensions, other than that of the examples, in which a share is shorter than one tower's batch."""
    if len(shape) != len(form.shape):
        return []
    shorter = [d for d, (local, full) in enumerate(zip(shape, form.shape, strict=True)) if local < full]
    examples = next((d for d in shorter if (shape[d], form.shape[d]) in shares), None)
    if examples is None:
        return []
    return [d for d in shorter if d != examples and form.paddings[d] is not None]


def _padded(tensor: Tensor, form: Form, shares: Sequence[tuple[int, int]]) -> Tensor:
    for d in padded_dims(tensor.shape, form, shares):
        padding, missing = form.paddings[d], form.shape[d] - tensor.shape[d]
        assert padding is not None
        widths = [0, 0] * (tensor.dim() - 1 - d) + ([missing, 0] if padding.before else [0, missing])
        tensor = F.pad(tensor, widths, value=padding.number)
    return tensor


# -- rounding --------------------------------------------------------------------------------------------

# A sum of many numbers is off by several units of the last place; one of half precision is computed in more digits, so
# that few results are rounded to the neighbouring number.
_FULL = 0.5, 32.0  # the fraction of the numbers that is moved, and by how many units of the last place
_HALF = 0.06, 1.0


class RoundingPerturbation:
    """Moves numbers by about as much as adding up in another order does; see [Note: rounding is measured].

    It has generators of its own, so that the script's draw the same numbers as in a run without it.
    """

    def __init__(self) -> None:
        self._generators: dict[torch.device, torch.Generator] = {}

    def perturb(self, output: Any) -> Any:
        """A module's output with some of its numbers a few units of the last place nearer to zero.

        Never farther away: a probability stays below 1. Anything but tensors, and tuples of them, stays as it is.
        """
        if type(output) is tuple:
            return tuple(self.perturb(element) for element in output)
        if type(output) is not Tensor or not output.is_floating_point() or output.layout != torch.strided:
            return output
        device = output.device
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(1)
        fraction, units = _HALF if output.dtype.itemsize <= 2 else _FULL
        chosen = torch.rand(output.shape, generator=self._generators[device], device=device) < fraction
        return output * (1 - units * torch.finfo(output.dtype).eps * chosen.to(output.dtype))


# -- random numbers --------------------------------------------------------------------------------------

DRAWING = {
    *("rand", "randn", "randint", "normal", "bernoulli", "multinomial", "poisson", "randperm"),
    *("rand_like", "randn_like", "randint_like"),
    *("uniform_", "normal_", "bernoulli_", "random_", "exponential_", "geometric_", "cauchy_", "log_normal_"),
}
"""The functions and methods of torch that draw from its generators, without dropout."""


def generator_state(device: torch.device) -> str:
    """A digest of the state of torch's generators."""
    of_device = [accelerator.get_rng_state(device)] if device.type != "cpu" else []
    return digest_of(torch.cat([torch.get_rng_state(), *of_device]))


def other_generators() -> dict[str, int]:
    """A hash of the state of Python's and NumPy's generators."""
    numpy = trees.leaves(np.random.get_state(legacy=False))
    words = tuple(value.tobytes() if isinstance(value, np.ndarray) else value for value in numpy)
    return {"Python's random": hash(random.getstate()), "numpy.random": hash(words)}


def shapes_of(one: Trace) -> dict[tuple[int, int], tuple[int, ...]]:
    """The shapes of what one tower has drawn, as :attr:`Interventions.shapes`."""
    draws = (((i, j), draw) for i, call in enumerate(one.calls) for j, draw in enumerate(call.draws))
    return {key: draw.shape for key, draw in draws if not draw.dropout}


class GlobalDraw(NamedTuple):
    """Random numbers of the global batch, and the tower that is to get its part of them.

    Attributes:
        key: tells this draw from others; equal on all towers and in both runs.
        shape: the shape of what one tower draws here; None where it draws nothing.
        shares: how many examples (this tower, all towers) have in each batch at hand.
        tower, towers: this tower's index, and their number.
    """

    key: Sequence[object]
    shape: tuple[int, ...] | None
    shares: Sequence[tuple[int, int]]
    tower: int
    towers: int


def _part_of(shape: Sequence[int], draw: GlobalDraw) -> tuple[slice, ...] | None:
    """The part of one tower's numbers that a tensor of this shape takes; None where that cannot be told."""
    if draw.shape is None or len(draw.shape) != len(shape):
        return None
    differing = [d for d, (full, local) in enumerate(zip(draw.shape, shape, strict=True)) if full != local]
    part = [slice(None)] * len(shape)
    if not differing:
        return tuple(part)
    if len(differing) > 1:
        return None
    [d] = differing
    full = draw.shape[d]
    for local, total in draw.shares:
        start, end = bounds(total, draw.towers, draw.tower)
        if total and end - start == local and full % total == 0 and shape[d] * total == full * local:
            times = full // total  # numbers for each example, one example after the other
            part[d] = slice(start * times, end * times)
            return tuple(part)
    return None


@torch.no_grad()
def draw_as_one_tower(
    name: str, result: Tensor, args: Sequence[Any], kwargs: Mapping[str, Any], draw: GlobalDraw
) -> bool:
    """Overwrite what a function has drawn by this tower's part of what one tower draws for the whole batch.

    Args:
        name, args, kwargs: the call; its name is in ``DRAWING``.
        result: its result.

    Returns:
        Whether these are the right numbers for certain. They are not where one tower draws nothing of that shape, and
        ``result`` stays as it was, nor where it draws several numbers for each example, whose order is a guess.
    """
    part = _part_of(result.shape, draw)
    if part is None or draw.shape is None:
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
    numbers = wide[part]
    if name == "normal":
        mean, deviation = (*args[:2], *(kwargs[key] for key in ("mean", "std") if key in kwargs), 1.0)[:2]
        numbers = numbers * deviation + mean
    elif name == "bernoulli":
        numbers = numbers < [*args, *(kwargs[key] for key in ("input", "p") if key in kwargs)][-1]
    result.copy_(numbers)
    return certain


def _limits(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, int]:
    """``low`` and ``high`` of ``randint`` and ``randint_like``."""
    numbers = [value for value in args if isinstance(value, int)]
    high = kwargs["high"] if "high" in kwargs else numbers.pop()
    low = kwargs["low"] if "low" in kwargs else numbers.pop() if numbers else 0
    return int(low), int(high)
