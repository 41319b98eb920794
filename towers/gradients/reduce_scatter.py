"""Averaging of which every tower keeps its part: half of an all-reduce, the other half when it is asked for.

With the optimizer's step shared out, a tower needs the average of its own part of each bucket only. So the all-reduce
stops half-way (a reduce-scatter): tower i averages the i-th part of every bucket into its own memory. The rest of a
gradient is completed (an all-gather) when somebody uses it: to clip, to log, to step an optimizer of another kind.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from towers.collectives.arithmetic import chunk_of
from towers.collectives.communicator import Communicator, WholeCall
from towers.collectives.shared_memory.regions import Regions
from towers.gradients.buckets import Bucket
from towers.system.memory_layout import flatten_real


class Scatter:
    """The buckets of the last backward, of which every tower has averaged its part.

    What a tower has reduced from, its owner may change only when that tower has come to the next meeting. That one is
    *owed*; most often the optimizer's step brings it anyway.
    """

    def __init__(self, channel: Communicator, regions: Regions) -> None:
        self._channel = channel
        self._regions = regions
        self._owed = False
        self._scattered: list[tuple[Bucket, list[Tensor]]] = []

    @property
    def incomplete(self) -> bool:
        """Whether there are buckets of which this tower has its own part only."""
        return bool(self._scattered)

    def divide(self, buckets: Sequence[Bucket]) -> None:
        """Tell new buckets which part of them this tower averages."""
        for bucket in buckets:
            bucket.own = self._part(bucket, self._channel.index)

    def reduce(self, buckets: Sequence[Bucket]) -> list[Tensor]:
        """Average this tower's part of packed buckets; returns the sum of all towers' tails of each."""
        with WholeCall(self._regions.barrier):
            return self._reduce(buckets)

    def _reduce(self, buckets: Sequence[Bucket]) -> list[Tensor]:
        self._regions.barrier.wait_tagged("averages gradients")
        self._owed = True
        tails = []
        for bucket in buckets:
            assert bucket.buffer is not None
            assert bucket.tail is not None
            tensors = self._regions.map_peers(bucket.key)
            if tensors is None:
                self._average_all(bucket, bucket.buffer)
                tails.append(bucket.tail)
                continue
            tail = tensors[0][bucket.numel :].clone()
            for other in tensors[1:]:
                tail += other[bucket.numel :]
            tails.append(tail)
            self._average_own(bucket, tensors)
            self._scattered.append((bucket, tensors))
        if self._regions.newly_mapped:
            self.settle_debts()
        return tails

    def _average_all(self, bucket: Bucket, buffer: Tensor) -> None:
        """Where some tower had no room for a window: average the whole bucket, another way."""
        apart = _apart([bucket])
        for gradient, view, start, end in apart:
            view[start:end].copy_(gradient[start:end])
        self._channel.all_reduce(buffer.mul_(1.0 / self._channel.size))
        for gradient, view, _, _ in apart:
            gradient.copy_(view)

    def _average_own(self, bucket: Bucket, tensors: list[Tensor]) -> None:
        done, end = bucket.own
        for slot in bucket.slots:
            if slot.apart and slot.filled is not None:
                low, high = slot.own
                self._regions.average_range(tensors, done, max(done, slot.start + low))
                mine = flatten_real(slot.filled[0])[low:high]
                self._regions.average_range(tensors, slot.start + low, slot.start + high, mine)
                done = slot.start + high
        self._regions.average_range(tensors, done, max(done, end))

    def complete(self) -> None:
        """Get the others' parts of what was reduced. All towers call it, or none."""
        with WholeCall(self._regions.barrier):
            self._complete()

    def _complete(self) -> None:
        apart = _apart([bucket for bucket, _ in self._scattered])
        for gradient, view, start, end in apart:
            view[start:end].copy_(gradient[start:end])
        self._regions.barrier.wait_tagged("uses the averaged gradients, or holds them when another backward begins")
        scattered, self._scattered = self._scattered, []
        for bucket, tensors in scattered:
            mine = tensors[self._channel.index]
            for tower, tensor in enumerate(tensors):
                if tower != self._channel.index:
                    start, end = self._part(bucket, tower)
                    mine[start:end].copy_(tensor[start:end])
        for gradient, view, start, end in apart:
            gradient[:start].copy_(view[:start])
            gradient[end:].copy_(view[end:])
        self._owed = True
        self.settle_debts()

    def drop(self) -> None:
        """Nobody needs what was reduced."""
        self._scattered = []

    def settle_debts(self, *, by_meeting: bool = False) -> None:
        """See that no tower still reads this one's buckets, or note that another meeting has seen to it."""
        if self._owed:
            if not by_meeting:
                self._regions.barrier.wait()
            self._regions.withdraw()
            self._owed = False

    def _part(self, bucket: Bucket, tower: int) -> tuple[int, int]:
        return chunk_of(bucket.numel, bucket.dtype.itemsize, self._channel.size, tower)


def _apart(buckets: Sequence[Bucket]) -> list[tuple[Tensor, Tensor, int, int]]:
    """Gradients that are apart and still held: flat, their place in the buffer, and this tower's part of them."""
    return [
        (flatten_real(gradient), flatten_real(slot.view), *slot.own)
        for bucket in buckets
        for slot in bucket.slots
        if slot.apart and slot.view is not None and (gradient := slot.pending) is not None
    ]
