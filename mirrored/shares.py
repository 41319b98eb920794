"""Shares: global batches are cut into them (rule R4, docs/concepts/towers.md). A table has the share of each tensor.

[Note: batch sizes travel beside the batch] A loss has to be divided by the size of the global batch (rule R3), of which
a tower has its own examples only, and the script hands nothing but its tensors to the loss. So a distributed dataset
notes in a table of its strategy (:class:`KnownShares`), for every tensor, array and other object of a batch that it
yields, the sizes of the share and of the global batch: by the object's identity, and weakly, so that nothing lives
longer. ``compute_average_loss``, ``strategy.backward``, metrics and all that treats stand-ins look there for the
arguments of ``strategy.run``; for a batch that came into the step by another way, the newest batch counts
(:meth:`KnownShares.at_hand`). An attribute or a subclass of tensors would be lost by the first ``x.to(…)`` and get in
the way of compilers, and adding up the towers' numbers would be a collective in every step.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from mirrored.events import Events
from towers.collectives.communicator import Communicator
from towers.system import tree as trees
from towers.system.newest import Newest


@dataclass(frozen=True)
class Share:
    """One tower's share of a global batch.

    Attributes:
        local: number of examples of this tower.
        total: number of examples of all towers together.
        stand_in: whether the batch of a tower without examples has an entry nevertheless, which counts nothing.
        may_stand_in: whether towers without examples get a stand-in in this dataset; set on all towers.
    """

    local: int
    total: int
    stand_in: bool = False
    may_stand_in: bool = False

    @property
    def entries(self) -> int:
        """The number of entries in the batch that the tower gets."""
        return self.local or int(self.stand_in)


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
    """Global batches are cut into ``parts``; this tower gets parts ``first`` … ``end`` - 1.

    There are as many parts as towers, or as virtual towers.

    Attributes:
        virtual: whether each part is computed by itself.
        stand_in: whether a tower without examples has one of another tower, which counts nothing.
    """

    parts: int
    first: int
    end: int
    virtual: bool = False
    stand_in: bool = False

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

    def share(self, examples: int) -> Share:
        """This tower's share of a batch."""
        start, end = self.bounds(examples)
        return Share(end - start, examples, self.stand_in and start == end and examples > 0, self.stand_in)

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
        in_hand: the share of the newest batch of each loop over distributed data.
        compared_examples: whether towers without a distributed batch have compared what they were given.
        shuffled: the seeds with which each object's examples are shuffled, by :func:`distribute`.
    """

    def __init__(self) -> None:
        self._shares = WeakIdKeyDictionary()
        self._stand_ins = WeakIdKeyDictionary()
        self.in_hand = Newest[Share]()
        self.compared_examples = False
        self.shuffled: MutableMapping[object, set[int]] = WeakIdKeyDictionary()

    def add(self, batch: Any, share: Share) -> None:
        """Remember the share for every tensor, array and other object in ``batch``."""
        for value in trees.leaves(batch):
            with contextlib.suppress(TypeError):  # texts and numbers take no weak reference
                self._shares[value] = share
                if share.stand_in:
                    self._stand_ins[value] = None

    def get(self, value: Any) -> Share | None:
        """The share that ``value`` came with, or None."""
        try:
            share: Share | None = self._shares.get(value)
        except TypeError:
            return None
        return share

    def of(self, values: Any) -> list[Share]:
        """The different shares of the distributed batches among some values."""
        shares = (self.get(value) for value in trees.leaves(values))
        return list({share: None for share in shares if share is not None})

    def local_examples(self, batch: Sequence[Any]) -> int:
        """The number of this tower's examples in the arguments of a step; of several batches or arrays, in the first.

        Raises:
            TypeError: neither their share is known nor an array or a list among them tells it.
        """
        if shares := self.of(batch):
            return shares[0].local
        if sizes := _sizes(batch):
            return sizes[0]
        raise TypeError("the number of examples in the arguments of strategy.backward is unknown")

    def is_empty(self, batch: Sequence[Any]) -> bool:
        """Whether the arguments of a step certainly hold no example."""
        sizes = [share.entries for share in self.of(batch)] or _sizes(batch)
        return bool(sizes) and not any(sizes)

    def at_hand(self, arguments: Any) -> list[Share]:
        """The shares of the batches among a run's arguments, else that of the newest batch."""
        newest = self.in_hand.value
        return self.of(arguments) or ([newest] if newest is not None else [])

    def named(self, batch: Any) -> list[Share]:
        """The share of the batch that a script names by ``batch=``; none for ``()``.

        Raises:
            ValueError: it is no distributed batch.
        """
        shares = self.of(batch)
        if not shares and not (isinstance(batch, tuple) and not batch):
            raise ValueError(
                "batch= contains no tensor of a batch of strategy.distribute_dataset: pass one of the batch's "
                "own tensors, or () for values that belong to no distributed batch"
            )
        return shares

    @property
    def has_stand_in(self) -> bool:
        """Whether anything of a stand-in is in hand or still lives; else looking for one is in vain."""
        newest = self.in_hand.value
        return (newest is not None and newest.stand_in) or len(self._stand_ins) > 0

    def holds_stand_in(self, arguments: Any) -> bool:
        """Whether any of the batches at hand is a stand-in."""
        return self.has_stand_in and any(share.stand_in for share in self.at_hand(arguments))


def is_array(value: Any) -> bool:
    """Whether a value is a tensor or an array of NumPy."""
    return isinstance(value, torch.Tensor) or type(value).__name__ == "ndarray"


def _sizes(batch: Sequence[Any]) -> list[int]:
    """How many entries the arrays among the arguments of a step have, or the lists where there are no arrays."""
    arrays = [int(leaf.shape[0]) for leaf in trees.leaves(batch) if is_array(leaf) and len(leaf.shape)]
    return arrays or [len(value) for value in batch if isinstance(value, list)]


Pieces = dict[int, tuple[Any, Sequence[Any]]]
"""By the ``id`` of each array and structure of a batch: it, and what stands for it in each virtual tower's part."""


@dataclass(frozen=True)
class Distribution:
    """A strategy's way of sharing out batches.

    Attributes:
        comm: the towers.
        cut: how a global batch is cut into their shares.
        known: which shares the batches in use are.
        events: the strategy's.
        pieces: those of the newest batch of each iterator whose parts were collated one by one, for virtual towers.
    """

    comm: Communicator
    cut: Cut
    known: KnownShares
    events: Events
    pieces: dict[object, Pieces] = field(default_factory=dict)

    def of_dataset(self, stand_in: bool) -> Distribution:
        """The way of one dataset, whose towers without examples may have a stand-in."""
        return replace(self, cut=replace(self.cut, stand_in=stand_in))
