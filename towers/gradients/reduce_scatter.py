"""An average of which every tower keeps its chunk: half of an all-reduce, and the other half on demand.

With a sharded optimizer step, a tower needs the average of only its own chunk of each bucket. So the all-reduce stops
half-way (a reduce-scatter): tower i averages the i-th chunk of every bucket into its own memory. The rest of a gradient
is gathered when it is used (:mod:`towers.gradients.lazy`): to clip, to log, or to step an optimizer of another kind. A
script that does so pays the costs of the unsharded step; any other script pays half of them.

Towers that share memory read each other's buckets (:class:`SharedChunks`). GPUs have a collective
(:class:`ScatteredChunks`), which does not reduce the tails: their flags go to all towers, in one small all-reduce for
all buckets of a backward.

[Note: deferred barrier] The owner of a bucket may write to it again only after the towers that have reduced from it
have reached the next barrier. That barrier is not called here but left to the next operation, which mostly is the
barrier of the optimizer's step. If it is another operation, :meth:`ReduceScatter.complete` calls the barrier.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from towers.collectives.agreement import RepeatedCalls
from towers.collectives.arithmetic import chunk_of
from towers.collectives.communicator import Communicator, InStep
from towers.collectives.process_group import ProcessGroupCommunicator
from towers.collectives.shared_memory.regions import Regions
from towers.gradients.buckets import Bucket
from towers.gradients.cycle import AllReduce
from towers.gradients.lazy import LazyGradient, make_lazy, make_ordinary
from towers.gradients.slots import Slot, handles_gradients
from towers.system.torch_private import disable_dynamo

_USES = "uses the averaged gradients, or keeps them until another backward starts"


class ReduceScatter(AllReduce):
    """Averages this tower's chunks of buckets, and completes their gradients on demand."""

    def __init__(self, channel: Communicator) -> None:
        super().__init__(channel)
        self._lazy: dict[Slot, TensorWeakRef] = {}  # the gradients that were averaged last
        self._reduced: list[Bucket] = []  # theirs, until they are gathered or dropped

    @handles_gradients
    def defer_rest(self) -> None:
        for bucket in self._reduced:
            for slot in bucket.slots:
                if (gradient := slot.gradient) is not None and slot.is_installed(gradient):
                    make_lazy(gradient, self.gather)
                    self._lazy[slot] = TensorWeakRef(gradient)

    def complete(self) -> None:
        if self._reduced:
            if self._living():
                self.gather()
            self._reduced, self._lazy = [], {}

    @disable_dynamo
    @handles_gradients
    def gather(self, *, agreed: bool = False) -> None:
        """Fetches the other towers' chunks of the reduced buckets. All towers call it, or none.

        Args:
            agreed: whether it is certain that all towers call it.

        Raises:
            DisagreementError: on all towers, if only some use a gradient.
        """
        if not self._reduced:
            return
        reduced, self._reduced = self._reduced, []
        self._fetch(reduced, agreed)
        for gradient in self._living().values():
            make_ordinary(gradient)
        self._lazy = {}

    @abstractmethod
    def _fetch(self, buckets: Sequence[Bucket], agreed: bool) -> None:
        """Gets the other towers' chunks. If the towers have not ``agreed`` to do so, it compares their calls."""

    def holds_moved_gradient(self, slots: Iterable[Slot]) -> bool:
        """Returns whether a lazily gathered gradient has been given to another parameter, among those of ``slots``."""
        living = self._living()
        return any(isinstance(slot.gradient, LazyGradient) and slot.gradient is not living.get(slot) for slot in slots)

    def _living(self) -> dict[Slot, Tensor]:
        """Returns the lazily gathered gradients that still exist."""
        return {slot: gradient for slot, ref in self._lazy.items() if (gradient := ref()) is not None}


class ScatteredChunks(ReduceScatter):
    """Averages chunks with the collectives of a backend, in parallel with the backward.

    Args:
        calls: compares the uses of gradients.
    """

    def __init__(self, channel: ProcessGroupCommunicator, calls: RepeatedCalls) -> None:
        super().__init__(channel)
        self._group = channel
        self._calls = calls

    def start(self, bucket: Bucket) -> None:
        self._pending.append(self._group.submit_chunk_average(bucket.chunks))

    def finish(self, buckets: Sequence[Bucket]) -> list[Tensor]:
        tails = [bucket.tail for bucket in buckets]
        together = torch.cat(tails)  # of the widest dtype
        self._pending.append(self._group.submit_average(together))
        super().finish(buckets)
        self._reduced += buckets
        return list(together.split([tail.numel() for tail in tails]))

    def _fetch(self, buckets: Sequence[Bucket], agreed: bool) -> None:
        if not agreed:
            self._calls.compare(_USES)
        for bucket in buckets:
            self._group.gather_chunks(bucket.chunks)


class SharedChunks(ReduceScatter):
    """Averages chunks in shared regions, all together when backward is done."""

    def __init__(self, channel: Communicator, regions: Regions) -> None:
        super().__init__(channel)
        self._regions = regions
        self._peers: dict[Bucket, list[Tensor]] = {}  # every tower's memory of the reduced buckets
        self._owes_barrier = False

    def start(self, bucket: Bucket) -> None:
        """Does nothing, because all buckets are reduced together, in :meth:`finish`."""

    def finish(self, buckets: Sequence[Bucket]) -> list[Tensor]:
        tails = []
        with InStep(self._regions.barrier):
            self._regions.barrier.wait_tagged("averages gradients")
            self._owes_barrier = True
            for bucket in buckets:
                tensors = self._regions.map_peers(bucket.key)
                if tensors is None:  # some tower had no memory for a region: another way, for the whole bucket
                    self._channel.all_reduce(bucket.buffer.mul_(1.0 / self._channel.size))
                    tails.append(bucket.tail)
                    continue
                end = bucket.chunks.numel()
                tails.append(torch.stack([tensor[end:] for tensor in tensors]).sum(0))
                self._regions.average_range(tensors, *self._chunk(bucket, self._channel.index))
                self._reduced.append(bucket)
                self._peers[bucket] = tensors
            if self._regions.newly_mapped:
                self.make_deferred_barrier()
        return tails

    def _chunk(self, bucket: Bucket, tower: int) -> tuple[int, int]:
        return chunk_of(bucket.numel, bucket.dtype.itemsize, self._channel.size, tower)

    def complete(self) -> None:
        super().complete()
        self._peers = {}
        self.make_deferred_barrier()

    def _fetch(self, buckets: Sequence[Bucket], agreed: bool) -> None:
        with InStep(self._regions.barrier):
            self._regions.barrier.wait_tagged(_USES)
            for bucket in buckets:
                tensors = self._peers.pop(bucket)
                local = tensors[self._channel.index]
                for tower, tensor in enumerate(tensors):
                    if tower != self._channel.index:
                        start, end = self._chunk(bucket, tower)
                        local[start:end].copy_(tensor[start:end])
            self._owes_barrier = True
            self.make_deferred_barrier()

    # -- barriers ----------------------------------------------------------------------------------------

    def barrier(self, purpose: str) -> None:
        """Meets the others after this tower's chunks were averaged (:meth:`Barrier.wait_tagged`)."""
        self._regions.barrier.wait_tagged(purpose)
        self._note_barrier()

    def make_deferred_barrier(self) -> None:
        """Ensures that no tower still reads this one's buckets (see [Note: deferred barrier])."""
        if self._owes_barrier:
            self._regions.barrier.wait()
            self._note_barrier()

    def _note_barrier(self) -> None:
        self._regions.close_files()
        self._owes_barrier = False
