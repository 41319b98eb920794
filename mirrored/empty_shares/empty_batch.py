"""Batches without examples, for towers whose share of a batch is empty.

[Note: one example and two] The collate function shows the form of a batch without examples. It is called with one
example and with two copies of it, and the two batches are compared. A dimension of a tensor, or the length of a list,
that has grown belongs to the examples, so it is 0 in an empty batch. Everything that is equal in both stays. Slicing a
batch of one example at 0 is not used: it left a phantom example in every list that was treated as a structure. A size
may have an offset: the offsets of sequences have one entry more than the sequences. The size for none is therefore 2 ·
one − two. The second example is a copy, since padding must not depend on another example. Numbers that have doubled are
counts.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from towers.system import tree as trees

_WHOLE = (str, bytes, bool, type(None), torch.dtype, torch.device)


class _NoEmptyForm(Exception):
    """A part of a batch cannot be empty. The message is a clause that names the part."""


def empty_batch(collate: Callable[[list[Any]], Any], example: Any, tower: int) -> Any:
    """Returns the batch that ``collate`` would make of no examples; see [Note: one example and two].

    Args:
        collate: makes a batch of a list of examples; called twice.
        example: any example of the data. It is copied, since collate functions may change their arguments.
        tower: this tower's index, for messages.

    Raises:
        TypeError: a part of its batches cannot be empty, such as a packed sequence.
    """
    alone = collate([_copied(example)])
    twice = collate([_copied(example), _copied(example)])
    comparison = _Comparison()
    try:
        nothing = comparison.empty(alone, twice, "batch")
        if not comparison.has_grown:
            raise _NoEmptyForm("nothing in it grows with the number of examples")
    except _NoEmptyForm as error:
        raise TypeError(
            f"tower {tower}'s share of a batch has no examples, and the result of collate_fn cannot be made "
            f"empty: {error}. Pass stand_in=True to distribute_dataset: a tower without examples then receives a "
            "batch of one example that does not count"
        ) from None
    return nothing


def _copied(example: Any) -> Any:
    try:
        return copy.deepcopy(example)
    except Exception:  # a user's object may raise anything; most collate functions change nothing
        return example


def narrow(array: Any, dim: int, start: int, end: int) -> Any:
    """Returns entries ``start`` to ``end`` of a tensor or array along a dimension."""
    if isinstance(array, np.ndarray):
        return array[(slice(None),) * (dim % array.ndim) + (slice(start, end),)]
    if array.layout is torch.strided:
        return array.narrow(dim, start, end - start)
    return array.index_select(dim, torch.arange(start, end, device=array.device))


class _Comparison:
    """Compares a batch of one example with a batch of two.

    Attributes:
        has_grown: whether anything was larger in the batch of two.
    """

    has_grown = False

    def empty(self, single: Any, double: Any, path: str) -> Any:
        """Returns the value in an empty batch that is ``single`` in a batch of one and ``double`` in a batch of two."""
        if type(single) is not type(double):
            raise _NoEmptyForm(
                f"{path} is a {type(single).__name__} with one example, and a {type(double).__name__} with two"
            )
        if isinstance(single, PackedSequence):
            raise _NoEmptyForm(f"{path} is a PackedSequence, which cannot be empty")
        if isinstance(single, (Tensor, np.ndarray)):
            return self._array(single, double, path)
        if isinstance(single, Mapping):
            if list(single) != list(double):
                raise _NoEmptyForm(f"{path} has the keys {list(single)} with one example, and {list(double)} with two")
            return trees.with_entries(single, [self.empty(single[k], double[k], f"{path}[{k!r}]") for k in single])
        if isinstance(single, (list, tuple)):
            if len(single) != len(double):
                return single[: self._size(len(single), len(double))]
            pairs = enumerate(zip(single, double, strict=True))
            return trees.with_entries(single, [self.empty(a, b, f"{path}[{i}]") for i, (a, b) in pairs])
        if dataclasses.is_dataclass(single) and not isinstance(single, type):
            return self._dataclass(single, double, path)
        if isinstance(single, _WHOLE):
            return single
        if isinstance(single, (int, float, complex, np.generic)):
            return type(single)(0) if self._counts(np.asarray(single), np.asarray(double)) else single
        return self._object(single, double, path)

    def _size(self, single: int, double: int) -> int:
        """Returns the size for no examples, even if it has an offset: see [Note: one example and two]."""
        if double <= single:
            return single
        self.has_grown = True
        return max(0, 2 * single - double)

    def _counts(self, single: Any, double: Any) -> bool:
        """Returns whether numbers count something in the examples, such as words: two equal examples double them."""
        if single.shape != double.shape:
            return False
        if isinstance(single, Tensor):
            if single.layout is not torch.strided or single.dtype is torch.bool:
                return False
            single, double = single.detach().cpu().double().numpy(), double.detach().cpu().double().numpy()
        if single.dtype.kind not in "iuf" or not single.any():
            return False
        doubled = bool(np.allclose(double, 2.0 * single, rtol=1e-6, atol=0.0))
        self.has_grown |= doubled
        return doubled

    def _array(self, single: Any, double: Any, path: str) -> Any:
        if isinstance(single, Tensor) and single.is_nested:
            raise _NoEmptyForm(f"{path} is a nested tensor, which cannot be split")
        if single.ndim != double.ndim:
            raise _NoEmptyForm(f"{path} has {single.ndim} dimensions with one example, and {double.ndim} with two")
        grown = [d for d in range(single.ndim) if double.shape[d] > single.shape[d]]
        if not grown:
            return single * 0 if self._counts(single, double) else single
        for d in grown:
            single = narrow(single, d, 0, self._size(single.shape[d], double.shape[d]))
        return single

    def _dataclass(self, single: Any, double: Any, path: str) -> Any:
        empty = copy.copy(single)
        for field in dataclasses.fields(single):
            value = self.empty(getattr(single, field.name), getattr(double, field.name), f"{path}.{field.name}")
            object.__setattr__(empty, field.name, value)
        return empty

    def _object(self, single: Any, double: Any, path: str) -> Any:
        """Returns any other object: sliced if its length has grown, as a data frame's, unchanged if both are equal."""
        kind = type(single).__name__
        try:
            if hasattr(single, "__len__") and len(double) > len(single):
                return single[: self._size(len(single), len(double))]
            if single is double or (not isinstance(single, (set, frozenset)) and bool(single == double)):
                return single
        except Exception as error:  # a user's object may raise anything
            raise _NoEmptyForm(f"{path} is a {kind}, which cannot be split ({error})") from None
        raise _NoEmptyForm(f"{path} is a {kind}, which cannot be split")
