"""Cuts the arguments of a step into the parts of this tower's virtual towers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mirrored.shares import Distribution, is_array
from towers.system import tree as trees


class Cutter:
    """Cuts batches where it is certain what belongs to the examples; see [Note: parts are copies].

    A value is the first of these that fits: something of a batch whose parts were collated one by one, an array with
    an entry for each example, a structure of such values, a list of examples, or the same for all parts.

    Args:
        distribution: how batches are shared out.
    """

    def __init__(self, distribution: Distribution) -> None:
        self._cut = distribution.cut
        self._known = distribution.known
        self._pieces = distribution.pieces

    def part(self, value: Any, local: int, index: int, derived: bool = False) -> Any:
        """The part of an argument of a step that one of this tower's virtual towers gets.

        Args:
            local: how many examples of this tower the step has.
            index: which of this tower's virtual towers, from 0.
            derived: a tensor that was made of the batch's tensors will do where parts were collated one by one.

        Raises:
            ValueError: a tensor, array or list has another number of entries.
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
        """The entries of an array or list that belong to a virtual tower's examples."""
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
    """Whether a value is a list of fields of a batch, not of the examples of one field."""
    return isinstance(value, (list, tuple)) and any(
        isinstance(item, (Mapping, list, tuple)) or is_array(item) for item in value
    )


def _holds_examples(value: Sequence[Any], count: int) -> bool:
    """Whether a list holds ``count`` examples rather than the fields of a batch of so many."""
    arrays = [leaf for leaf in trees.leaves(value) if is_array(leaf)]
    return len(value) == count and not any(len(array.shape) and array.shape[0] == count for array in arrays)


def _described(value: Any) -> str:
    if is_array(value):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    return f"a {type(value).__name__} of {len(value)} entries"
