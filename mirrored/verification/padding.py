"""The padding of batches: what a tensor's dimensions are padded with, and shares that are padded as a batch is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from towers.system import tree as trees


class Padding(NamedTuple):
    """How a dimension is padded, if it is: before its entries or behind them, and with which number."""

    before: bool
    number: float


class Form(NamedTuple):
    """The shape and the paddings of a tensor of a batch.

    Attributes:
        shape: its shape.
        paddings: how each dimension with at least two entries is padded.
    """

    shape: tuple[int, ...]
    paddings: tuple[Padding | None, ...]


def tensors_of(value: Any) -> Iterator[Tensor]:
    """The tensors in a nested value; those of the arguments of ``run`` are numbered in this order."""
    return (leaf for leaf in trees.leaves(value) if isinstance(leaf, Tensor))


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
