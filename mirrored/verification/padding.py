"""Batches that each tower pads to the longest example of its own share, where one tower pads to that of all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mirrored.verification.trace import Ends, Form, Seen
from towers.system import tree as trees

Forms = Mapping[tuple[int, int], Form]
"""By the numbers of the run and of the tensor among its arguments."""


def form_of(tensor: Tensor) -> Form:
    """The form of a tensor; without ends where it has a single dimension or its layout is not dense."""
    tensor = tensor.detach()
    dense = tensor.layout == torch.strided and not tensor.is_complex() and tensor.dim() > 1 and tensor.numel()
    ends = [_ends(tensor, d) if dense and tensor.shape[d] > 1 else None for d in range(tensor.dim())]
    return Form(tuple(tensor.shape), tuple(ends))


def _ends(tensor: Tensor, dim: int) -> Ends:
    first, last = tensor.select(dim, 0).flatten(), tensor.select(dim, -1).flatten()
    return Ends(*_most_frequent(first), *_most_frequent(last), len(first))


def _most_frequent(flat: Tensor) -> tuple[float, int]:
    wide = flat.to("cpu", torch.float64)
    value = wide.mode().values
    return float(value), int((wide == value).sum())


def tensors_of(arguments: Any) -> Iterator[Tensor]:
    """The tensors among the arguments of ``run``, in the order in which they are numbered."""
    return (leaf for leaf in trees.leaves(arguments) if isinstance(leaf, Tensor))


def pad(arguments: Any, number: int, forms: Forms, shares: Sequence[tuple[int, int]]) -> Any:
    """The arguments of ``run`` with shares padded as one tower's batch is.

    Args:
        number: of the run.
        forms: what one tower's batches look like.
        shares: (this tower's, all towers') examples of the batches at hand.
    """
    numbers = iter(range(sum(1 for _ in tensors_of(arguments))))

    def padded(leaf: Any) -> Any:
        form = forms.get((number, next(numbers))) if isinstance(leaf, Tensor) else None
        return leaf if form is None else _padded(leaf, form, shares)

    return trees.map_leaves(padded, arguments)


def padded_dims(shape: Sequence[int], form: Form, shares: Sequence[tuple[int, int]]) -> list[int]:
    """The dimensions in which a share is shorter than one tower's batch, those of the examples aside."""
    if len(shape) != len(form.shape):
        return []
    shorter = [d for d, (own, whole) in enumerate(zip(shape, form.shape, strict=True)) if own < whole]
    examples = next((d for d in shorter if (shape[d], form.shape[d]) in shares), None)
    if examples is None:
        return []
    return [d for d in shorter if d != examples and form.ends[d] is not None]


def _padded(tensor: Tensor, form: Form, shares: Sequence[tuple[int, int]]) -> Tensor:
    for d in padded_dims(tensor.shape, form, shares):
        ends = form.ends[d]
        assert ends is not None
        at_start = ends.padding_is_first
        shape = list(tensor.shape)
        shape[d] = form.shape[d] - shape[d]
        filling = tensor.new_full(shape, ends.first if at_start else ends.last)
        tensor = torch.cat([filling, tensor] if at_start else [tensor, filling], d)
    return tensor


def forms_of(one: Seen) -> Forms:
    """What one tower's batches look like."""
    return {(i, j): form for i, run in enumerate(one.runs) for j, form in enumerate(run.forms)}


def padded_lengths(one: Seen, many: Sequence[Seen], at: int) -> tuple[int, list[int]] | None:
    """To what one tower pads a batch of step number ``at``, and each of N its share; None where it is the same."""
    for i, run in enumerate(one.runs):
        if run.steps != at or not run.trained:
            continue
        for j, whole in enumerate(run.forms):
            shares = [(seen.runs[i].forms[j].shape, seen.runs[i].shares) for seen in many if _has(seen, i, j)]
            dims = {d for shape, sizes in shares for d in padded_dims(shape, whole, sizes)}
            if dims:
                d = min(dims)
                return whole.shape[d], [shape[d] for shape, _ in shares]
    return None


def _has(seen: Seen, run: int, tensor: int) -> bool:
    return run < len(seen.runs) and tensor < len(seen.runs[run].forms)
