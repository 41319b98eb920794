"""Shares: global batches are cut into them (rule R4, docs/rules.md), and a table knows the share of each tensor.

[Note: batch sizes travel beside the batch] A loss has to be divided by the size of the global batch (rule R3), of which
a tower has its own examples only, and the script hands nothing but its tensors to the loss. So a distributed dataset
notes in a table of its strategy (:class:`KnownShares`), for every tensor, array and other object of a batch that it
yields, the sizes of the share and of the global batch: by the object's identity, and weakly, so that nothing lives
longer. ``compute_average_loss``, ``strategy.backward``, metrics and all that treats stand-ins look there for the
arguments of ``strategy.run``; for a batch that came into the step by another way, the newest batch counts
(:attr:`KnownShares.in_hand`). An attribute or a subclass of tensors would be lost by the first ``x.to(…)`` and get in
the way of compilers, and adding up the towers' numbers would be a collective in every step.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from mirrored.events import Events
from towers.collectives.communicator import Communicator
from towers.system import tree as trees


@dataclass(frozen=True)
class Share:
    """One tower's share of a global batch.

    Attributes:
        local: number of examples of this tower.
        total: number of examples of all towers together.
        stand_in: how many entries the batch of a tower without examples has nevertheless; they count nothing.
        may_stand_in: whether that is so on towers without examples, of which this one need not be one.
    """

    local: int
    total: int
    stand_in: int = 0
    may_stand_in: bool = False

    @property
    def entries(self) -> int:
        """The number of entries in the batch that the tower gets."""
        return self.local or self.stand_in


Batch = tuple[Any, Share]
"""A tower's batch of a step, and its share of the global batch."""


def bounds(examples: int, towers: int, index: int) -> tuple[int, int]:
    """The begin and end of tower ``index``'s share of a batch.

    Shares are contiguous and cut as ``numpy.array_split`` cuts: sizes differ by one at most, the larger ones
    come first, and when there are fewer examples than towers the last shares are empty.
    """
    size, larger = divmod(examples, towers)
    start = index * size + min(index, larger)
    return start, start + size + (index < larger)


@dataclass(frozen=True)
class Cut:
    """The cut of global batches into ``parts``, of which this tower's share joins those from ``first`` to ``end``.

    There are as many parts as towers, or as virtual towers.

    Attributes:
        virtual: whether each part is computed by itself.
    """

    parts: int
    first: int
    end: int
    virtual: bool = False

    @property
    def tower(self) -> int:
        """This tower's index."""
        return self.first // (self.end - self.first)

    def empty_shares(self, examples: int) -> int:
        """The number of towers, the last ones, that get nothing of a batch of so many examples."""
        parts_here = self.end - self.first
        return self.parts // parts_here - min(-(-examples // parts_here), self.parts // parts_here)

    def bounds(self, examples: int) -> tuple[int, int]:
        """The begin and end of this tower's share of a batch."""
        return bounds(examples, self.parts, self.first)[0], bounds(examples, self.parts, self.end - 1)[1]

    def parts_of(self, local: int) -> list[tuple[int, int]]:
        """The begins and ends of the parts of a share of ``local`` examples, within the share.

        The sizes of a batch's parts never increase, so those of a share are what cutting the share alone gives.
        """
        parts_here = self.end - self.first
        return [bounds(local, parts_here, part) for part in range(parts_here)]


def cut_for(towers: int, index: int, virtual_towers: int | None) -> Cut:
    """The cut of batches on tower ``index`` of ``towers``.

    Raises:
        ValueError: that many virtual towers cannot be added up by a balanced tree, or not be shared out evenly.
    """
    if virtual_towers is None:
        return Cut(towers, index, index + 1)
    count = operator.index(virtual_towers)
    if count < 1 or count & (count - 1):
        raise ValueError(f"virtual_towers is {count}, but must be a power of two")
    if count % towers:
        raise ValueError(
            f"virtual_towers is {count}, which {towers} towers cannot share evenly; the number of towers has to "
            "be a power of two that is not larger"
        )
    parts_here = count // towers
    return Cut(count, parts_here * index, parts_here * (index + 1), virtual=True)


class KnownShares:
    """Remembers which share a batch's tensors (or other objects) belong to, as long as they live.

    See [Note: batch sizes travel beside the batch].

    Attributes:
        in_hand: the share of the newest batch, until its dataset is asked for another one.
    """

    def __init__(self) -> None:
        self._shares = WeakIdKeyDictionary()
        self._held: dict[object, dict[int, tuple[Any, Sequence[Any]]]] = {}
        self.in_hand: Share | None = None
        self._stand_ins = WeakIdKeyDictionary()

    def add(self, batch: Any, share: Share) -> None:
        """Remember the share for every tensor, array and other object in ``batch``."""
        for value in trees.leaves(batch):
            with contextlib.suppress(TypeError):  # texts and numbers take no weak reference
                self._shares[value] = share
                if share.stand_in:
                    self._stand_ins[value] = None

    @property
    def has_stand_in(self) -> bool:
        """Whether anything of a stand-in is in hand or still lives; else looking for one is in vain."""
        in_hand = self.in_hand is not None and self.in_hand.stand_in > 0
        return in_hand or len(self._stand_ins) > 0

    def of(self, values: Any) -> list[Share]:
        """The different shares of the distributed batches among some values."""
        shares = (self.get(value) for value in trees.leaves(values))
        return list({share: None for share in shares if share is not None})

    def hold(self, iterator: object, whole: Any, parts: Sequence[Any]) -> None:
        """An iterator's newest batch was collated part by part: remember what stands for its tensors and structures."""
        pieces: dict[int, tuple[Any, Sequence[Any]]] = {}
        _pair(whole, parts, pieces)
        self._held[iterator] = pieces

    def drop(self, iterator: object) -> None:
        """An iterator's newest batch is no longer in hand."""
        self._held.pop(iterator, None)

    def local_of(self, batch: Sequence[Any]) -> int:
        """The number of this tower's examples in the arguments of a step: as is known, else as their first array says.

        Raises:
            TypeError: it cannot be told.
        """
        if shares := self.of(batch):
            return shares[0].local
        if sizes := _sizes(batch):
            return sizes[0]
        raise TypeError("the number of examples in the arguments of strategy.backward cannot be told")

    def is_empty(self, batch: Sequence[Any]) -> bool:
        """Whether the arguments of a step hold no example for certain: as is known, else as arrays and lists say."""
        if shares := self.of(batch):
            return not any(share.entries for share in shares)
        sizes = _sizes(batch)
        return bool(sizes) and not any(sizes)

    def part(self, value: Any, cut: Cut, local: int, index: int, derived: bool = False) -> Any:
        """The part of an argument of a step that one of this tower's virtual towers gets.

        Args:
            local: how many examples of this tower the step has.
            index: which of this tower's virtual towers, from 0.
            derived: a tensor that was made of the batch's tensors will do where parts were collated one by one.

        Raises:
            ValueError: a tensor, array or list has another number of entries.
        """
        for pieces in self._held.values():
            if (piece := pieces.get(id(value))) is not None:
                return piece[1][index]
        if isinstance(value, Mapping):
            return trees.like(value, {key: self.part(entry, cut, local, index) for key, entry in value.items()})
        if isinstance(value, (list, tuple)):
            if _is_structure(value) and not _holds_examples(value, local):
                fields = [self.part(entry, cut, local, index) for entry in value]
                return type(value)(*fields) if hasattr(value, "_fields") else type(value)(fields)
        elif not _is_array(value) or len(value.shape) == 0:
            return value
        share = self.get(value) if _is_array(value) else None
        entries = len(value)
        if entries != (share.local if share is not None else local):
            raise ValueError(
                f"strategy.backward was given {_described(value)}, but this tower's share has {local} examples, so it "
                "cannot be cut into virtual towers; what has no entry for each example, let loss_fn take from outside"
            )
        if share is None and self._held and _is_array(value) and not derived:
            raise ValueError(
                f"strategy.backward was given {_described(value)}, which is not one of the batch's own: a batch of a "
                "collate_fn is collated anew for every virtual tower, so that padding and random choices do not depend "
                "on the number of towers. Give the batch's own tensors to strategy.backward, and change them in loss_fn"
            )
        start, end = cut.parts_of(entries)[index]
        return value[start:end]

    def get(self, value: Any) -> Share | None:
        """The share that ``value`` came with, or None."""
        try:
            share: Share | None = self._shares.get(value)
        except TypeError:
            return None
        return share


@dataclass(frozen=True)
class Distribution:
    """A strategy's way of sharing out batches.

    Attributes:
        comm: the towers.
        cut: how a global batch is cut into their shares.
        known: which shares the batches in use are.
        events: of the strategy.
    """

    comm: Communicator
    cut: Cut
    known: KnownShares
    events: Events


def _pair(whole: Any, parts: Sequence[Any], pieces: dict[int, tuple[Any, Sequence[Any]]]) -> None:
    """Note, by the ``id`` of every array and structure in ``whole``, it and what stands for it in each part."""
    if not _is_array(whole) and (not isinstance(whole, (Mapping, list, tuple)) or not whole):
        return
    pieces[id(whole)] = whole, parts  # with it, so that nothing else gets its id
    if isinstance(whole, Mapping):
        for key in whole:
            _pair(whole[key], [part[key] for part in parts], pieces)
    elif isinstance(whole, (list, tuple)) and all(len(part) == len(whole) for part in parts):
        for value, *others in zip(whole, *parts, strict=True):
            _pair(value, others, pieces)


def _is_array(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or type(value).__name__ == "ndarray"


def _holds_examples(value: Sequence[Any], count: int) -> bool:
    """Whether a list holds ``count`` examples rather than the fields of a batch of so many."""
    arrays = [leaf for leaf in trees.leaves(value) if _is_array(leaf)]
    return len(value) == count and not any(len(array.shape) and array.shape[0] == count for array in arrays)


def _described(value: Any) -> str:
    if _is_array(value):
        return f"a {type(value).__name__} of shape {tuple(value.shape)}"
    return f"a {type(value).__name__} of {len(value)} entries"


def _is_structure(value: list[Any] | tuple[Any, ...]) -> bool:
    """Whether a list holds fields of a batch, not the examples of one field."""
    return any(isinstance(item, (Mapping, list, tuple)) or _is_array(item) for item in value)


def _sizes(batch: Sequence[Any]) -> list[int]:
    """How many entries the arrays among the arguments of a step have, or the lists where there are no arrays."""
    arrays = [int(leaf.shape[0]) for leaf in trees.leaves(batch) if _is_array(leaf) and len(leaf.shape)]
    return arrays or [len(value) for value in batch if isinstance(value, list)]
