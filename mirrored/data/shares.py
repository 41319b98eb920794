"""How a global batch is cut into the towers' shares (rule R4 of the design)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from towers import tree as trees


@dataclass(frozen=True)
class Share:
    """What one tower holds of a global batch.

    Attributes:
        local: number of examples of this tower.
        total: number of examples of all towers together.
    """

    local: int
    total: int


def bounds(examples: int, towers: int, index: int) -> tuple[int, int]:
    """Where tower ``index``'s share of a batch begins and ends.

    Shares are contiguous and cut as ``numpy.array_split`` cuts: sizes differ by one at most, the larger ones
    come first, and when there are fewer examples than towers the last shares are empty.
    """
    size, larger = divmod(examples, towers)
    start = index * size + min(index, larger)
    return start, start + size + (index < larger)


@dataclass(frozen=True)
class Cut:
    """How global batches are cut: into ``parts``, of which this tower's share joins those from ``first`` to ``end``.

    There are as many parts as towers, or as virtual towers.
    """

    parts: int
    first: int
    end: int

    def bounds(self, examples: int) -> tuple[int, int]:
        """Where this tower's share of a batch begins and ends."""
        return bounds(examples, self.parts, self.first)[0], bounds(examples, self.parts, self.end - 1)[1]

    def parts_of(self, local: int) -> list[tuple[int, int]]:
        """Where the parts of a share of ``local`` examples begin and end, within the share.

        The sizes of a batch's parts never increase, so those of a share are what cutting the share alone gives.
        """
        own = self.end - self.first
        return [bounds(local, own, part) for part in range(own)]


class KnownShares:
    """Remembers which share a batch's tensors (or other objects) belong to, as long as they live.

    Attributes:
        in_hand: the share of the newest batch, until its dataset is asked for another one.
    """

    def __init__(self) -> None:
        self._shares = WeakIdKeyDictionary()
        self._parts = WeakIdKeyDictionary()
        self.in_hand: Share | None = None

    def add(self, batch: Any, share: Share) -> None:
        """Remember the share for every tensor, array and other object in ``batch``."""
        for value in trees.leaves(batch):
            with contextlib.suppress(TypeError):  # texts and numbers take no weak reference
                self._shares[value] = share

    def add_parts(self, batch: Any, parts: Sequence[Any]) -> None:
        """Remember what virtual towers get in the place of pieces cut from the tensors and arrays of ``batch``."""
        arrays = [[leaf for leaf in trees.leaves(tree) if _is_array(leaf)] for tree in (batch, *parts)]
        if len({len(of_one) for of_one in arrays}) == 1:  # else a list of as many as there are examples, to be cut
            for value, *pieces in zip(*arrays, strict=True):
                self._parts[value] = pieces

    def part(self, value: Any, number: int) -> Any:
        """What the virtual tower ``number`` of this tower gets in the place of a piece of ``value``, or None."""
        pieces = self._parts.get(value) if _is_array(value) else None
        return pieces[number] if pieces is not None else None

    def get(self, value: Any) -> Share | None:
        """The share that ``value`` came with, or None."""
        try:
            found: Share | None = self._shares.get(value)
        except TypeError:
            return None
        return found


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or type(value).__name__ == "ndarray"


def cut(batch: Any, start: int, end: int, of: int | None = None, instead: Callable[[Any], Any] = lambda _: None) -> Any:
    """Entries ``start`` to ``end`` of every tensor, array and list of a collated batch.

    Args:
        batch: nested dicts, tuples and lists whose leaves have the examples as their first dimension, as
            ``default_collate`` makes them; a list of texts counts as a leaf. Single numbers stay.
        of: leaves with another number of entries stay, too.
        instead: what to take in the place of a leaf's entries, if it gives anything.

    Raises:
        TypeError: something in it cannot be cut.
    """
    if isinstance(batch, Mapping):
        return trees.like(batch, {key: cut(value, start, end, of, instead) for key, value in batch.items()})
    if isinstance(batch, (list, tuple)) and _is_structure(batch) and not _holds_examples(batch, of):
        parts = [cut(value, start, end, of, instead) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if isinstance(batch, (bool, int, float)) or (_is_array(batch) and len(batch.shape) == 0):
        return batch  # one number for all examples
    if (known := instead(batch)) is not None:
        return known
    if of is not None and (not hasattr(batch, "__len__") or isinstance(batch, (str, bytes)) or len(batch) != of):
        return batch
    try:
        return batch[start:end]
    except (TypeError, IndexError, KeyError) as error:
        raise TypeError(
            f"a batch with a {type(batch).__name__} in it cannot be cut into shares ({error}); let collate_fn "
            "return tensors, arrays or lists with the examples as their first dimension"
        ) from None


def _holds_examples(batch: Sequence[Any], count: int | None) -> bool:
    """Whether a list holds ``count`` examples rather than the fields of a batch of so many."""
    arrays = [leaf for leaf in trees.leaves(batch) if _is_array(leaf)]
    return len(batch) == count and not any(len(array.shape) and array.shape[0] == count for array in arrays)


def join(parts: Sequence[Any]) -> Any:
    """The batch that :func:`cut` cuts into these parts, or None where they do not fit together."""
    first = parts[0]
    if isinstance(first, Mapping):
        fields = {key: join([part[key] for part in parts]) for key in first}
        return None if any(field is None for field in fields.values()) else trees.like(first, fields)
    if isinstance(first, (list, tuple)) and _is_structure(first):
        if len({len(part) for part in parts}) > 1:
            return None
        columns = [join(column) for column in zip(*parts, strict=True)]
        if any(column is None for column in columns):
            return None
        return type(first)(*columns) if hasattr(first, "_fields") else type(first)(columns)
    if isinstance(first, torch.Tensor):
        if first.dim() == 0 or len({(part.shape[1:], part.dtype) for part in parts}) > 1:
            return None
        return torch.cat(list(parts))
    if isinstance(first, list):
        return [value for part in parts for value in part]
    return None


def _is_structure(value: list[Any] | tuple[Any, ...]) -> bool:
    """Whether a list holds fields of a batch, not the examples of one field."""
    return any(isinstance(item, (Mapping, list, tuple)) or _is_array(item) for item in value)


def count_examples(batch: Any) -> int:
    """The size of the first dimension of the first tensor or array (else list) in a batch.

    Raises:
        TypeError: there is none.
    """
    for value in trees.leaves(batch):
        if _is_array(value) and len(value.shape) > 0:
            return int(value.shape[0])
    if isinstance(batch, (list, tuple)):
        return len(batch)
    raise TypeError(f"the number of examples in a batch of type {type(batch).__name__} cannot be told")
