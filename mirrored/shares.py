"""Shares of global batches (rule R4, docs/concepts/towers.md), and a table with the share of each tensor.

[Note: batch sizes are sent with the batch] A loss must be divided by the size of the global batch (rule R3). A tower
has only its own examples of it, and the script passes only its tensors to the loss. A distributed dataset therefore
records, in a table of its strategy (:class:`KnownShares`), the sizes of the share and of the global batch. It does so
for every tensor, array and other object of a batch that it yields. Entries are weak references by the object's
identity, so they do not extend its lifetime. ``compute_average_loss``, ``strategy.backward``, metrics and all code for
stand-ins look up the arguments of ``strategy.run`` in this table. If a batch reached the step in another way, the
newest batch counts (:meth:`KnownShares.at_hand`). An attribute or a subclass of tensors would be lost at the first
``x.to(…)`` and would hinder compilers. Adding up the towers' numbers would be a collective in every step.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections import Counter
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from mirrored.events import Events
from towers.collectives.communicator import Communicator
from towers.health.status import Newest
from towers.system import tree as trees


@dataclass(frozen=True)
class Share:
    """One tower's share of a global batch.

    Attributes:
        local: the number of examples of this tower.
        total: the number of examples of all towers together.
        stand_in: whether the batch of a tower without examples nevertheless has an entry, which does not count.
        may_stand_in: whether towers without examples receive a stand-in in this dataset; set on all towers.
    """

    local: int
    total: int
    stand_in: bool = False
    may_stand_in: bool = False

    @property
    def entries(self) -> int:
        """The number of entries in the batch that the tower receives."""
        return self.local or int(self.stand_in)


Batch = tuple[Any, Share]
"""A tower's batch of a step, and its share of the global batch."""


@functools.lru_cache  # a training has few sizes, and needs their bounds several times per step
def bounds(examples: int, towers: int, index: int) -> tuple[int, int]:
    """Returns the start and end of tower ``index``'s share of a batch.

    Shares are contiguous and split like ``numpy.array_split``: sizes differ by at most one, and the larger ones are
    first. If there are fewer examples than towers, the last shares are empty.
    """
    size, larger = divmod(examples, towers)
    start = index * size + min(index, larger)
    return start, start + size + (index < larger)


@dataclass(frozen=True)
class Cut:
    """The split of global batches into ``parts``, of which this tower receives parts ``first`` … ``end`` - 1.

    There are as many parts as towers, or as virtual towers.

    Attributes:
        virtual: whether each part is computed separately.
        stand_in: whether a tower without examples receives one of another tower, which does not count.
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
        """Returns the number of towers, the last ones, that receive no examples of a batch of this size."""
        parts_here = self.end - self.first
        return self.parts // parts_here - min(-(-examples // parts_here), self.parts // parts_here)

    def bounds(self, examples: int) -> tuple[int, int]:
        """Returns the start and end of this tower's share of a batch."""
        return bounds(examples, self.parts, self.first)[0], bounds(examples, self.parts, self.end - 1)[1]

    def share(self, examples: int) -> Share:
        """Returns this tower's share of a batch."""
        start, end = self.bounds(examples)
        return Share(end - start, examples, self.stand_in and start == end and examples > 0, self.stand_in)

    def parts_of(self, local: int) -> list[tuple[int, int]]:
        """Returns the starts and ends of the parts of a share of ``local`` examples, within the share.

        The sizes of a batch's parts never increase, so splitting the share alone gives the same parts.
        """
        parts_here = self.end - self.first
        return [bounds(local, parts_here, part) for part in range(parts_here)]


def cut_for(towers: int, index: int, virtual_towers: int | None) -> Cut:
    """Returns the split of batches on tower ``index`` of ``towers``.

    Raises:
        ValueError: a balanced tree cannot sum this number of virtual towers, or it cannot be split evenly among the
            towers.
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
    """Maps a batch's tensors (or other objects) to their share, for as long as they exist.

    See [Note: batch sizes are sent with the batch].

    Attributes:
        in_hand: the share of the newest batch of each loop over distributed data.
        compared_examples: whether towers without a distributed batch have compared their examples.
        shuffled: how often :func:`distribute` has shuffled each object's examples, by seed.
        hints: what :func:`distribute` has logged about towers without examples.
    """

    def __init__(self) -> None:
        self._shares = WeakIdKeyDictionary()
        self._stand_ins = WeakIdKeyDictionary()
        self.in_hand = Newest[Share]()
        self.compared_examples = False
        self.shuffled: MutableMapping[object, Counter[int]] = WeakIdKeyDictionary()
        self.hints: set[str] = set()

    def add(self, batch: Any, share: Share) -> None:
        """Records the share for every tensor, array and other object in ``batch``."""
        for value in trees.leaves(batch):
            with contextlib.suppress(TypeError):  # strings and numbers do not support weak references
                self._shares[value] = share
                if share.stand_in:
                    self._stand_ins[value] = None

    def get(self, value: Any) -> Share | None:
        """Returns the share to which ``value`` belongs, or None."""
        try:
            share: Share | None = self._shares.get(value)
        except TypeError:
            return None
        return share

    def of(self, values: Any) -> list[Share]:
        """Returns the different shares of the distributed batches among some values."""
        shares = (self.get(value) for value in trees.leaves(values))
        return list({share: None for share in shares if share is not None})

    def local_examples(self, batch: Sequence[Any]) -> int:
        """Returns the number of this tower's examples in the arguments of a step. The first of several batches counts.

        Raises:
            TypeError: their share is unknown, and there is no array or list among them.
        """
        if shares := self.of(batch):
            return shares[0].local
        if sizes := _sizes(batch):
            return sizes[0]
        raise TypeError("the number of examples in the arguments of strategy.backward is unknown")

    def is_empty(self, batch: Sequence[Any]) -> bool:
        """Returns whether the arguments of a step certainly contain no example."""
        sizes = [share.entries for share in self.of(batch)] or _sizes(batch)
        return bool(sizes) and not any(sizes)

    def at_hand(self, arguments: Any) -> list[Share]:
        """Returns the shares of the batches among a run's arguments, otherwise the share of the newest batch."""
        newest = self.in_hand.value
        return self.of(arguments) or ([newest] if newest is not None else [])

    def named(self, batch: Any) -> list[Share]:
        """Returns the share of the batch that a script names with ``batch=``, or none for ``()``.

        Raises:
            ValueError: it is not a distributed batch.
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
        """Whether an object of a stand-in is in use or still exists. Otherwise, no lookup is needed."""
        newest = self.in_hand.value
        return (newest is not None and newest.stand_in) or len(self._stand_ins) > 0

    def holds_stand_in(self, arguments: Any) -> bool:
        """Returns whether one of the current batches is a stand-in."""
        return self.has_stand_in and any(share.stand_in for share in self.at_hand(arguments))


def is_array(value: Any) -> bool:
    """Returns whether a value is a tensor or a NumPy array."""
    return isinstance(value, torch.Tensor) or type(value).__name__ == "ndarray"


def _sizes(batch: Sequence[Any]) -> list[int]:
    """Returns the numbers of entries of the arrays among the arguments of a step; without arrays, of the lists."""
    arrays = [int(leaf.shape[0]) for leaf in trees.leaves(batch) if is_array(leaf) and len(leaf.shape)]
    return arrays or [len(value) for value in batch if isinstance(value, list)]


Pieces = dict[int, tuple[Any, Sequence[Any]]]
"""By the ``id`` of each array and structure of a batch: the object, and its counterparts in the virtual towers' parts.
"""


@dataclass(frozen=True)
class Distribution:
    """How a strategy splits batches.

    Attributes:
        comm: the towers.
        cut: how a global batch is split into their shares.
        known: the shares of the batches in use.
        events: the strategy's events.
        pieces: for virtual towers: the pieces of each iterator's newest batch, if its parts were collated separately.
    """

    comm: Communicator
    cut: Cut
    known: KnownShares
    events: Events
    pieces: dict[object, Pieces] = field(default_factory=dict)

    def of_dataset(self, stand_in: bool) -> Distribution:
        """Returns the distribution of one dataset, whose towers without examples may receive a stand-in."""
        return replace(self, cut=replace(self.cut, stand_in=stand_in))
