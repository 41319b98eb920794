"""The division of an optimizer's parameters: every tower updates its chunk of each bucket, and its rows of tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from towers.collectives.arithmetic import chunk_of
from towers.gradients.buckets import DenseSlot, Slot

_PIECE_BYTES = 2**19
"""An optimizer traverses a parameter several times. On a CPU, a piece of this size stays in the cache between them."""


@dataclass(frozen=True)
class Shard:
    """A piece of a tower's chunk of one parameter.

    Attributes:
        group: index of the optimizer's parameter group.
        slot: the parameter's.
        start, end: the range of its elements, in memory order.
        whole: whether the parameter is not divided, and every tower updates all of it.
    """

    group: int
    slot: Slot
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

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the shard of a tensor with the parameter's shape and strides: a flat view, or the tensor itself."""
        if self.whole or tensor.dim() == 0:
            return tensor.detach()
        return tensor.as_strided((self.end - self.start,), (1,), tensor.storage_offset() + self.start)

    def is_at(self, place: Tensor, tensor: Tensor) -> bool:
        """Returns whether ``place`` is the result of :meth:`of` for ``tensor``."""
        offset = 0 if self.whole else self.start * self.slot.dtype.itemsize
        return place.data_ptr() == tensor.data_ptr() + offset

    def gradient(self) -> Tensor | None:
        """Returns the shard of the parameter's gradient, or None."""
        parameter, gradient = self.parameter, self.slot.gradient
        if gradient is not None and not gradient.is_sparse and gradient.stride() != parameter.stride():
            gradient = torch.empty_like(parameter).copy_(gradient)
        return None if gradient is None else self.of(gradient)


@dataclass(frozen=True)
class RowShard(Shard):
    """Rows ``start`` to ``end`` of a parameter with sparse gradients."""

    def of(self, tensor: Tensor) -> Tensor:
        if tensor.is_sparse:
            return torch.narrow_copy(tensor.coalesce(), 0, self.start, self.end - self.start)
        return tensor.detach()[self.start : self.end] if tensor.dim() else tensor.detach()


def cut_rows(slot: Slot, towers: int) -> list[int]:
    """Returns the rows of a table at which the towers' shards start, and the end of the last one.

    For a parameter that buckets split, it returns [0].

    [Note: cuts between rows] The used rows are distributed as unevenly as words are, and similarly in all steps. So the
    rows that the present gradient has are split into equal parts. Every n-th row would be as even, but torch adds a
    sparse gradient one by one to rows with gaps between them.
    """
    if isinstance(slot, DenseSlot):
        return [0]
    rows, gradient, nths = slot.shape[0], slot.gradient, torch.arange(1, towers, device="cpu")
    cuts = nths * rows // towers
    if gradient is not None and gradient.is_sparse and (used := gradient.coalesce().indices()[0]).numel() >= towers:
        cuts = used.cpu()[nths * used.numel() // towers]
    return [0, *cuts.tolist(), rows]


def shards_of(
    tower: int, groups: Sequence[Sequence[Slot]], cuts: Mapping[Slot, Sequence[int]], towers: int
) -> list[Shard]:
    """Returns the shards of one tower, in the order of the optimizer's parameters.

    Args:
        groups: the optimizer's.
        cuts: :func:`cut_rows` of the parameters to divide.
    """
    shards: list[Shard] = []
    for group, slots in enumerate(groups):
        for slot in slots:
            if slot not in cuts:
                shards.append(Shard(group, slot, 0, slot.shape.numel(), whole=True))
                continue
            if not isinstance(slot, DenseSlot):
                shards.append(RowShard(group, slot, cuts[slot][tower], cuts[slot][tower + 1]))
                continue
            low, high = chunk_of(slot.bucket.numel, slot.bucket.dtype.itemsize, towers, tower)
            real = 2 if slot.dtype.is_complex else 1
            start = (max(low, slot.start) - slot.start) // real
            end = (min(high, slot.start + slot.numel) - slot.start) // real
            step = _PIECE_BYTES // slot.dtype.itemsize if slot.bucket.device.type == "cpu" else max(end - start, 1)
            shards += [Shard(group, slot, at, min(at + step, end)) for at in range(start, end, step)]
    return shards


def ranges(shards: Sequence[Shard]) -> dict[int, list[tuple[int, int]]]:
    """Returns the ranges that shards cover, by the index of the bucket, in as few pieces as possible."""
    covered: dict[int, list[tuple[int, int]]] = {}
    dense = [(shard.slot, shard) for shard in shards if isinstance(shard.slot, DenseSlot)]
    for slot, shard in sorted(dense, key=lambda pair: (pair[0].bucket.index, pair[0].start, pair[1].start)):
        pieces = covered.setdefault(slot.bucket.index, [])
        real = 2 if slot.dtype.is_complex else 1
        start, end = slot.start + real * shard.start, slot.start + real * shard.end
        # Between them may be only the gap that aligns the second.
        if pieces and start - pieces[-1][1] < slot.bucket.alignment:
            start, _ = pieces.pop()
        pieces.append((start, end))
    return covered
