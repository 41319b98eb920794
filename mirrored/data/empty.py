"""Batches of no examples, for towers whose share of a batch is empty.

What a collate function would make of no examples is not guessed: one example is collated alone and twice in one batch,
and the two batches are compared. A dimension of a tensor or the length of a list that has grown belongs to the
examples, so it is 0 in a batch of none; what is the same in both stays.
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


class NoEmptyForm(TypeError):
    """A part of a batch cannot be empty; the message is a clause that names it."""


def empty_batch(collate: Callable[[list[Any]], Any], example: Any) -> Any:
    """What ``collate`` would make of no examples.

    Args:
        collate: makes a batch of a list of examples; called twice.
        example: any one of the data; it is copied, since collate functions may change what they are given.

    Raises:
        NoEmptyForm: a part of its batches cannot be empty, such as a packed sequence.
    """
    alone = collate([_copied(example)])
    twice = collate([_copied(example), _copied(example)])
    comparison = _Comparison()
    nothing = comparison.empty(alone, twice, "batch")
    if not comparison.has_grown:
        raise NoEmptyForm("nothing in it grows with the number of examples")
    return nothing


def _copied(example: Any) -> Any:
    try:
        return copy.deepcopy(example)
    except Exception:  # whatever an object of the user's raises: most collate functions change nothing
        return example


class _Comparison:
    """Compares a batch of one example with one of two.

    Attributes:
        has_grown: whether anything was larger in the batch of two.
    """

    has_grown = False

    def empty(self, one: Any, two: Any, path: str) -> Any:
        """A value in the batch of no examples that is ``one`` in that of one example and ``two`` in that of two."""
        if type(one) is not type(two):
            raise NoEmptyForm(f"{path} is a {type(one).__name__} with one example, and a {type(two).__name__} with two")
        if isinstance(one, PackedSequence):
            raise NoEmptyForm(f"{path} is a PackedSequence, which cannot be empty")
        if isinstance(one, (Tensor, np.ndarray)):
            return self._array(one, two, path)
        if isinstance(one, Mapping):
            if list(one) != list(two):
                raise NoEmptyForm(f"{path} has the keys {list(one)} with one example, and {list(two)} with two")
            return trees.like(one, {key: self.empty(one[key], two[key], f"{path}[{key!r}]") for key in one})
        if isinstance(one, tuple) and hasattr(one, "_fields"):
            return type(one)(*self._entries(one, two, path))
        if isinstance(one, (list, tuple)):
            if len(one) != len(two):
                return one[: self._size(len(one), len(two))]
            return type(one)(self._entries(one, two, path))
        if dataclasses.is_dataclass(one) and not isinstance(one, type):
            return self._dataclass(one, two, path)
        if isinstance(one, _WHOLE):
            return one
        if isinstance(one, (int, float, complex)):
            return one * 0 if self._counts(np.asarray(one), np.asarray(two)) else one
        if isinstance(one, np.generic):
            return one * one.dtype.type(0) if self._counts(np.asarray(one), np.asarray(two)) else one
        return self._object(one, two, path)

    def _entries(self, one: Any, two: Any, path: str) -> list[Any]:
        return [self.empty(a, b, f"{path}[{i}]") for i, (a, b) in enumerate(zip(one, two, strict=True))]

    def _size(self, one: int, two: int) -> int:
        """A size that may be more than the number of examples, as that of the offsets at which sequences begin."""
        if two <= one:
            return one
        self.has_grown = True
        return max(0, 2 * one - two)

    def _counts(self, one: Any, two: Any) -> bool:
        """Whether numbers count something in the examples, such as words: twice as much in two equal ones."""
        if one.shape != two.shape:
            return False
        if isinstance(one, Tensor):
            if one.layout is not torch.strided or one.dtype is torch.bool:
                return False
            one, two = one.detach().cpu().double().numpy(), two.detach().cpu().double().numpy()
        if one.dtype.kind not in "iuf" or not one.any():
            return False
        doubled = bool(np.allclose(two, 2.0 * one, rtol=1e-6, atol=0.0))
        self.has_grown |= doubled
        return doubled

    def _array(self, one: Any, two: Any, path: str) -> Any:
        if isinstance(one, Tensor) and one.is_nested:
            raise NoEmptyForm(f"{path} is a nested tensor, which cannot be cut")
        if one.ndim != two.ndim:
            raise NoEmptyForm(f"{path} has {one.ndim} dimensions with one example, and {two.ndim} with two")
        grown = [d for d in range(one.ndim) if two.shape[d] > one.shape[d]]
        if not grown:
            return one * 0 if self._counts(one, two) else one
        for d in grown:
            size = self._size(one.shape[d], two.shape[d])
            if not isinstance(one, Tensor):
                one = one[(slice(None),) * d + (slice(size),)]
            elif one.layout is torch.strided:
                one = one.narrow(d, 0, size)
            else:
                one = one.index_select(d, torch.arange(size, device=one.device))
        return one

    def _dataclass(self, one: Any, two: Any, path: str) -> Any:
        empty = copy.copy(one)
        for field in dataclasses.fields(one):
            value = self.empty(getattr(one, field.name), getattr(two, field.name), f"{path}.{field.name}")
            object.__setattr__(empty, field.name, value)
        return empty

    def _object(self, one: Any, two: Any, path: str) -> Any:
        """Anything else: cut if it has a length that has grown, as a data frame has, and kept if it is the same."""
        kind = type(one).__name__
        try:
            if hasattr(one, "__len__") and len(two) > len(one):
                return one[: self._size(len(one), len(two))]
            if one is two or (not isinstance(one, (set, frozenset)) and bool(one == two)):
                return one
        except Exception as error:  # whatever an object of the user's raises
            raise NoEmptyForm(f"{path} is a {kind}, which cannot be cut ({error})") from None
        raise NoEmptyForm(f"{path} is a {kind}, which cannot be cut")
