"""How packed buckets become means over the towers: the interface, and the all-reduce.

Others are :class:`towers.gradients.reduce_scatter.ReduceScatter`, where every tower averages its own chunks only, and
:class:`towers.gradients.tree_sum.TreeSum`, whose sums do not depend on the number of towers.

[Note: where the mean is taken] Through Gloo gradients are multiplied by 1/N on the way into the bucket, as DDP does,
instead of divided after the sum: one pass over memory less (1.9 ms of a 75 ms step for 10 million parameters on one
core), and the bits of DDP with the same buckets. For N a power of two both are the same bits. NCCL takes gradients as
they are and multiplies as it reads them (``ReduceOp.AVG``); shared memory multiplies piece by piece, in the cache.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from towers.collectives.communicator import Communicator, Pending
from towers.gradients.buckets import Bucket
from towers.gradients.sparse import SparseSlot, average_rows


class Reduction(ABC):
    """Reduces packed buckets over all towers, which make the same calls in the same order.

    Attributes:
        scale: what gradients are multiplied by on their way into the buckets (see [Note: where the mean is taken]).
    """

    scale: float = 1.0

    @abstractmethod
    def start(self, bucket: Bucket) -> None:
        """Start to reduce a packed bucket, beside the backward where that can be."""

    @abstractmethod
    def finish(self, buckets: Sequence[Bucket]) -> list[Tensor]:
        """Return when all buckets that were started are reduced (on a GPU: when later work will see it).

        Args:
            buckets: those, in the order in which they were started.

        Returns:
            Every tail's sum over the towers, or its mean: zero where no tower has set a flag.
        """

    @abstractmethod
    def reduce_sparse(self, slot: SparseSlot) -> None:
        """Reduce a sparse gradient: to a sparse one, coalesced, unless some tower's is dense; to a dense one then."""


class AllReduce(Reduction):
    """Means of whole buckets, by all-reduces.

    The communicator decides where they run: through c10d beside the backward, in shared memory in place and all
    together when they are awaited (see [Note: copied at once] in :mod:`towers.gradients.buckets`).
    """

    def __init__(self, channel: Communicator) -> None:
        self.scale = channel.prescale
        self._channel = channel
        self._pending: list[Pending] = []

    def start(self, bucket: Bucket) -> None:
        self._pending.append(self._channel.submit_average(bucket.buffer))

    def finish(self, buckets: Sequence[Bucket]) -> list[Tensor]:
        pending, self._pending = self._pending, []
        for average in pending:
            average.wait()
        return [bucket.tail for bucket in buckets]

    def reduce_sparse(self, slot: SparseSlot) -> None:
        mean = slot.contribution(self._channel)
        if mean.is_sparse:
            mean = average_rows(self._channel, mean)
        else:
            self._channel.all_reduce(mean)
            mean /= self._channel.size
        slot.replace(mean)
