"""The padding of batches: detects how a tensor's dimensions are padded, and pads shares like a batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from towers.system import tree as trees


class Padding(NamedTuple):
    """The padding of a dimension, if it has one: before its entries or after them, and its number."""

    before: bool
    number: float


class Form(NamedTuple):
    """The shape and the paddings of a tensor of a batch.

    Attributes:
        shape: its shape.
        paddings: the padding of each dimension with at least two entries.
    """

    shape: tuple[int, ...]
    paddings: tuple[Padding | None, ...]


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in a nested value. The tensors in the arguments of ``run`` are numbered in this order."""
    return (leaf for leaf in trees.leaves(value) if isinstance(leaf, Tensor))


def form_of(tensor: Tensor) -> Form:
    """Returns the form of a tensor, without paddings if it has a single dimension or its layout is not dense."""
    tensor = tensor.detach()
    dense = tensor.layout == torch.strided and not tensor.is_complex() and tensor.dim() > 1 and tensor.numel()
    paddings = [_padding(tensor, d) if dense and tensor.shape[d] > 1 else None for d in range(tensor.dim())]
    return Form(tuple(tensor.shape), tuple(paddings))


def _padding(tensor: Tensor, dim: int) -> Padding:
    """Returns the padding of a dimension.

    Most examples are shorter than the longest, so they are padded with the most frequent number at an end. If all
    entries at an end are equal (in a mask), it has no padding.
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
    """Returns the arguments of ``run``, with shares padded like one tower's batch.

    Args:
        call: the number of the call of ``run``.
        forms: see :attr:`Interventions.padding`.
        shares: the numbers of examples (this tower, all towers) in each batch in use.
    """
    numbers = iter(range(sum(1 for _ in tensors_of(arguments))))

    def padded(leaf: Any) -> Any:
        form = forms.get((call, next(numbers))) if isinstance(leaf, Tensor) else None
        return leaf if form is None else _padded(leaf, form, shares)

    return trees.map_leaves(padded, arguments)


def padded_dims(shape: Sequence[int], form: Form, shares: Sequence[tuple[int, int]]) -> list[int]:
    """Returns the dimensions, except that of the examples, in which a share is shorter than one tower's batch."""
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
