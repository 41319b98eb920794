"""How an optimizer's parameters are divided: every tower updates its chunk of each bucket."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from towers.collectives.arithmetic import chunk_of
from towers.gradients.buckets import DenseSlot

_PIECE_BYTES = 2**19
"""An optimizer goes over a parameter several times; over a piece of this size it does so within the cache."""


@dataclass(frozen=True)
class Shard:
    """A piece of a tower's chunk of one parameter.

    Attributes:
        group: index of the optimizer's parameter group.
        slot: the parameter's place in the buckets.
        start, end: which of its elements, in the order in which they lie in memory.
        whole: the parameter is not divided; every tower updates all of it.
    """

    group: int
    slot: DenseSlot
    start: int
    end: int
    whole: bool = False

    @property
    def parameter(self) -> Tensor:
        parameter = self.slot.parameter()
        assert parameter is not None  # the optimizer holds it
        return parameter

    @property
    def nbytes(self) -> int:
        return (self.end - self.start) * self.slot.dtype.itemsize

    @property
    def place(self) -> tuple[int, int]:
        """Where in the bucket it begins and ends, in elements of the bucket's dtype."""
        real = 2 if self.slot.dtype.is_complex else 1
        return self.slot.start + real * self.start, self.slot.start + real * self.end

    def of(self, tensor: Tensor) -> Tensor:
        """The shard of a tensor with the parameter's shape and strides: flat, or the tensor itself; no copy."""
        if self.whole or tensor.dim() == 0:
            return tensor.detach()
        return tensor.as_strided((self.end - self.start,), (1,), tensor.storage_offset() + self.start)

    def is_at(self, place: Tensor, tensor: Tensor) -> bool:
        """Whether ``place`` is :meth:`of` ``tensor``."""
        offset = 0 if self.whole else self.start * self.slot.dtype.itemsize
        return place.data_ptr() == tensor.data_ptr() + offset


def shards_of(
    tower: int, groups: Sequence[Sequence[DenseSlot]], whole: Collection[DenseSlot], towers: int
) -> list[Shard]:
    """The shards of one tower, in the order of the optimizer's parameters.

    Args:
        groups: the optimizer's.
        whole: the parameters that are not to be divided.
    """
    shards = []
    for group, slots in enumerate(groups):
        for slot in slots:
            if slot in whole:
                shards.append(Shard(group, slot, 0, slot.shape.numel(), whole=True))
                continue
            low, high = chunk_of(slot.bucket.numel, slot.bucket.dtype.itemsize, towers, tower)
            real = 2 if slot.dtype.is_complex else 1
            start = (max(low, slot.start) - slot.start) // real
            end = (min(high, slot.start + slot.numel) - slot.start) // real
            step = _PIECE_BYTES // slot.dtype.itemsize
            shards += [Shard(group, slot, at, min(at + step, end)) for at in range(start, end, step)]
    return shards


def ranges(shards: Sequence[Shard]) -> dict[int, list[tuple[int, int]]]:
    """What shards cover, by the index of the bucket, in as few pieces as can be."""
    covered: dict[int, list[tuple[int, int]]] = {}
    for shard in sorted(shards, key=lambda shard: (shard.slot.bucket.index, shard.place)):
        pieces = covered.setdefault(shard.slot.bucket.index, [])
        start, end = shard.place
        # Between them may be nothing but the room that aligns the second.
        if pieces and start - pieces[-1][1] < shard.slot.bucket.alignment:
            start, _ = pieces.pop()
        pieces.append((start, end))
    return covered
