"""Splits ready-made batches into shares, along the dimensions of the examples.

A batch that was collated elsewhere (a loader with ``batch_size=None``, a pipeline) does not show which of its
dimensions counts examples.

[Note: ready-made batches are not guessed] A batch is split only if its structure is unambiguous: all arrays have the
same first dimension, and lists have as many entries, which are not arrays. Numbers, strings and None are given whole. A
list of dicts with equal keys may hold examples or fields, and raises an error. So does a list of arrays with equal
shapes that has at least as many arrays as these have rows. The first batch decides for later batches of its structure.
A last batch of one example is therefore not refused because of its size.

``batch_dims`` describes all other batches, like ``in_dims`` of ``torch.vmap``, with a structure like the batch's:

* a dimension: a tensor or array is split along it, a list (dimension 0) by its entries, and a dict or named tuple in
  every entry;
* None: every tower receives the part whole;
* a function ``(value, start, end)`` that splits any other object.

The number of examples is the size of the parts that have a dimension: ``[0, None]`` for a batch and class weights,
``(1, 1)`` for two time-major tensors, ``0`` for a list of dicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from mirrored.empty_shares import narrow
from towers.system import tree as trees

Dims = int | None | Callable[[Any, int, int], Any] | Mapping[Any, Any] | Sequence[Any]
"""A structure like the batch's: the dimension of the examples, None for parts given whole, or a splitting function."""

_HOW = (
    "name the per-example parts with batch_dims=, a structure like the batch's: a dimension such as 0 (of a "
    "list: its entries), None for parts that every tower receives whole, or a function (value, start, end)"
)


class BatchDims:
    """Splits the ready-made batches of one source.

    Args:
        by_user: the user's ``batch_dims``; None to infer them from the first batch of a structure.
    """

    def __init__(self, by_user: Dims = None) -> None:
        self._by_user = by_user
        self._seen: Dims = None

    @property
    def are_given(self) -> bool:
        """Whether the user gave ``batch_dims``."""
        return self._by_user is not None

    def examples(self, batch: Any) -> int:
        """Returns the number of examples in a batch.

        Raises:
            TypeError, ValueError: the number is ambiguous, or ``batch_dims`` do not fit.
        """
        if self._by_user is not None:
            return _count(batch, self._by_user)
        if self._seen is not None:
            try:
                return _count(batch, self._seen)
            except (TypeError, ValueError):
                pass  # its structure differs from that of the earlier batches
        self._seen = _Reading(batch).dims
        return _count(batch, self._seen)

    def cut(self, batch: Any, start: int, end: int) -> Any:
        """Returns examples ``start`` to ``end`` of a batch whose examples were counted."""
        return _cut(batch, self._by_user if self._by_user is not None else self._seen, start, end)


# -- with known dimensions -------------------------------------------------------------------------------


def _pairs(value: Any, dims: Any, path: str) -> list[tuple[Any, Any, str]] | None:
    """Returns the entries of a structure with their dimensions and paths, or None if ``dims`` are for the whole."""
    named = isinstance(value, tuple) and hasattr(value, "_fields") and not isinstance(value, PackedSequence)
    if _is_dim(dims) and (named or isinstance(value, Mapping)):
        dims = [dims] * len(value) if named else dict.fromkeys(value, dims)
    if isinstance(dims, Mapping):
        if not isinstance(value, Mapping):
            raise TypeError(f"batch_dims for {path} are a dict, but it is a {type(value).__name__}")
        if set(dims) != set(value):
            raise TypeError(f"batch_dims for {path} have the keys {list(dims)}, but it has {list(value)}")
        return [(entry, dims[key], f"{path}[{key!r}]") for key, entry in value.items()]
    if isinstance(dims, (list, tuple)):
        if not isinstance(value, (list, tuple)) or len(value) != len(dims):
            kind = f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, (list, tuple)) else "")
            raise TypeError(f"batch_dims for {path} are {len(dims)} entries, but it is {kind}")
        return [(entry, d, f"{path}[{i}]") for i, (entry, d) in enumerate(zip(value, dims, strict=True))]
    if not (dims is None or _is_dim(dims) or callable(dims)):
        raise TypeError(f"batch_dims for {path} are {dims!r}, but must be a dimension, None or a function")
    return None


def _is_dim(dims: Any) -> bool:
    return isinstance(dims, int) and not isinstance(dims, bool)


def _sizes(value: Any, dims: Any, path: str = "batch") -> Iterator[tuple[str, int]]:
    """Yields the path and the number of examples of each part of a batch that has a dimension."""
    pairs = _pairs(value, dims, path)
    if pairs is not None:
        for entry, entry_dims, entry_path in pairs:
            yield from _sizes(entry, entry_dims, entry_path)
    elif _is_dim(dims):
        yield path, _size(value, dims, path)


def _size(value: Any, dim: int, path: str) -> int:
    if isinstance(value, (Tensor, np.ndarray)):
        if not -value.ndim <= dim < value.ndim:
            raise ValueError(f"batch_dims for {path} are {dim}, but its shape is {tuple(value.shape)}")
        return int(value.shape[dim])
    if dim != 0 or not hasattr(value, "__len__") or isinstance(value, (str, bytes, PackedSequence)):
        raise TypeError(f"batch_dims for {path} are {dim}, but a {type(value).__name__} has no such dimension")
    return len(value)


def _count(batch: Any, dims: Dims) -> int:
    sizes = list(_sizes(batch, dims))
    if not sizes:
        raise TypeError("the number of examples in a batch is unknown: batch_dims give no dimension")
    for path, size in sizes:
        if size != sizes[0][1]:
            raise ValueError(f"{path} has {size} examples, but {sizes[0][0]} has {sizes[0][1]}: {_HOW}")
    return sizes[0][1]


def _cut(value: Any, dims: Any, start: int, end: int, path: str = "batch") -> Any:
    pairs = _pairs(value, dims, path)
    if pairs is not None:
        return trees.with_entries(value, [_cut(entry, dims, start, end, path) for entry, dims, path in pairs])
    if dims is None:
        return value
    if callable(dims):
        return dims(value, start, end)
    try:
        if not isinstance(value, (Tensor, np.ndarray)):
            return value[start:end]
        part = narrow(value, dims, start, end)
        # As on one tower, where the whole batch is the share: ``view(-1)`` needs it.
        return part.contiguous() if isinstance(value, Tensor) and value.is_contiguous() else part
    except (TypeError, IndexError, KeyError, RuntimeError) as error:
        raise TypeError(f"{path} is a {type(value).__name__}, which cannot be split ({error}): {_HOW}") from None


# -- with inferred dimensions ----------------------------------------------------------------------------


class _Reading:
    """Infers the dimensions of a batch's examples; see [Note: ready-made batches are not guessed].

    Attributes:
        dims: the dimensions of the examples, in a structure like the batch's.

    Raises:
        TypeError: a part is ambiguous, or does not fit.
    """

    def __init__(self, batch: Any) -> None:
        self._arrays: list[tuple[str, str, int]] = []  # path, description and number of examples
        self._lists: list[tuple[str, str, int]] = []
        self._nested: list[tuple[str, Sequence[Any]]] = []
        self.dims = self._read(batch, "batch")
        if not (sized := self._arrays + self._lists):
            raise TypeError(f"the number of examples in a batch of type {type(batch).__name__} is unknown: {_HOW}")
        first, description, examples = sized[0]
        for path, value in self._nested:
            if not self._arrays or len(value) == examples:
                raise TypeError(
                    f"{path} is a {type(value).__name__} of {len(value)} lists: one for each example, or fields of a "
                    f"batch of {examples}? {_HOW}"
                )
        for path, other, size in sized:
            if size != examples:
                raise TypeError(f"{first} {description}, but {path} {other}, so a batch cannot be split: {_HOW}")

    def _read(self, value: Any, path: str) -> Any:
        """Returns the dimensions of a value, provided that all parts with a size have equally many examples."""
        if _has_dimensions(value):
            self._arrays.append((path, f"has shape {tuple(value.shape)}", int(value.shape[0])))
            return 0
        if isinstance(value, Mapping):
            return {key: self._read(entry, f"{path}[{key!r}]") for key, entry in value.items()}
        if isinstance(value, (list, tuple)) and not isinstance(value, PackedSequence):
            if _is_flat(value):
                self._lists.append((path, f"has {len(value)} entries", len(value)))
                return 0
            _refuse_either_way(value, path)
            if _is_nested(value):
                self._nested.append((path, value))
            return [self._read(entry, f"{path}[{i}]") for i, entry in enumerate(value)]
        if value is None or isinstance(value, (str, bytes, int, float, complex, np.generic, Tensor, np.ndarray)):
            return None
        raise TypeError(f"{path} is a {type(value).__name__}, so a batch cannot be split: {_HOW}")


def _refuse_either_way(value: Sequence[Any], path: str) -> None:
    """Refuses a list that may hold examples as well as fields."""
    if value and all(isinstance(entry, Mapping) and set(entry) == set(value[0]) for entry in value):
        raise TypeError(
            f"{path} is a {type(value).__name__} of {len(value)} dicts with equal keys: one for each example, or "
            f"fields of a batch? {_HOW}"
        )
    arrays = [entry for entry in value if _has_dimensions(entry)]
    alike = len({(tuple(a.shape), str(a.dtype)) for a in arrays}) == 1 and len(arrays) == len(value)
    if alike and len(value) > 1 and len(value) >= arrays[0].shape[0]:
        raise TypeError(
            f"{path} is a {type(value).__name__} of {len(value)} arrays of shape {tuple(arrays[0].shape)}: one for "
            f"each example, or fields of a batch of {arrays[0].shape[0]}? {_HOW}"
        )


def _has_dimensions(value: Any) -> bool:
    return isinstance(value, (Tensor, np.ndarray)) and value.ndim > 0


def _is_flat(value: Sequence[Any]) -> bool:
    """Returns whether nothing in a list could be split itself, so that its entries belong to the examples."""
    return not hasattr(value, "_fields") and not any(
        isinstance(entry, (Mapping, list, tuple)) or _has_dimensions(entry) for entry in value
    )


def _is_nested(value: Sequence[Any]) -> bool:
    """Returns whether a list consists of lists that contain no arrays."""
    lists = all(isinstance(entry, (list, tuple)) and not hasattr(entry, "_fields") for entry in value)
    return lists and not any(_has_dimensions(leaf) for leaf in trees.leaves(value))
