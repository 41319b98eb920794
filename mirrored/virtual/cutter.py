"""Splits the arguments of a step among this tower's virtual towers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mirrored.shares import Distribution, is_array
from towers.system import tree as trees


class Cutter:
    """Splits batches if it is unambiguous which values are per-example; see [Note: parts are copies].

    The first of these cases that fits applies: the value belongs to a batch whose parts were collated separately; it is
    an array with an entry per example, a structure of such values, or a list of examples; otherwise, all parts receive
    it.

    Args:
        distribution: how batches are split.
    """

    def __init__(self, distribution: Distribution) -> None:
        self._cut = distribution.cut
        self._known = distribution.known
        self._pieces = distribution.pieces

    def part(self, value: Any, local: int, index: int, derived: bool = False) -> Any:
        """Returns the part of a step's argument for one of this tower's virtual towers.

        Args:
            local: the number of this tower's examples in the step.
            index: the index of the virtual tower on this tower, from 0.
            derived: whether tensors computed from the batch's tensors are accepted even if parts were collated
                separately.

        Raises:
            ValueError: a tensor, array or list has another number of entries; or see ``derived``.
        """
        for pieces in self._pieces.values():
            if (piece := pieces.get(id(value))) is not None:
                return piece[1][index]
        if is_array(value):
            return self._entries(value, local, index, derived) if len(value.shape) else value
        if isinstance(value, Mapping) or (_is_structure(value) and not _holds_examples(value, local)):
            return trees.with_entries(value, [self.part(entry, local, index) for entry in trees.entries(value)])
        return self._entries(value, local, index) if isinstance(value, (list, tuple)) else value

    def _entries(self, value: Any, local: int, index: int, derived: bool = True) -> Any:
        """Returns the entries of an array or list that belong to a virtual tower's examples."""
        share = self._known.get(value)
        entries = len(value)
        if entries != (share.local if share is not None else local):
            raise ValueError(
                f"strategy.backward was given {_described(value)}, but this tower's share has {local} examples, "
                "so it cannot be split into virtual towers; let loss_fn take values without an entry for each "
                "example from outside"
            )
        if share is None and self._pieces and not derived:
            raise ValueError(
                f"strategy.backward was given {_described(value)}, which is not one of the batch's own: with a "
                "collate_fn, every virtual tower collates its own examples, so that padding and random choices "
                "do not depend on the number of towers. Give the batch's own tensors to strategy.backward, and "
                "change them in loss_fn"
            )
        start, end = self._cut.parts_of(entries)[index]
        return value[start:end]


def _is_structure(value: Any) -> bool:
    """Returns whether a value is a list of fields of a batch, not of the examples of one field."""
    return isinstance(value, (list, tuple)) and any(
        isinstance(item, (Mapping, list, tuple)) or is_array(item) for item in value
    )


def _holds_examples(value: Sequence[Any], count: int) -> bool:
    """Returns whether a list contains ``count`` examples, not the fields of a batch of ``count`` examples."""
    arrays = [leaf for leaf in trees.leaves(value) if is_array(leaf)]
    return len(value) == count and not any(len(array.shape) and array.shape[0] == count for array in arrays)


def _described(value: Any) -> str:
    if is_array(value):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    return f"a {type(value).__name__} of {len(value)} entries"
