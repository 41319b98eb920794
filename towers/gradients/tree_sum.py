"""Sums in the order of a balanced binary tree: within a tower, and over the towers.

[Note: trees need whole leaves] Virtual towers' gradients are summed when all of them are computed, not while the last
one's backward runs, because a tree needs complete leaves. On CPUs, this loses no time. On GPUs, communication is not
hidden behind the last backward. The buckets, the usage flags and the shared memory are those of averaging.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from towers.collectives.communicator import Communicator
from towers.gradients.buckets import Bucket
from towers.gradients.cycle import Reduction
from towers.gradients.sparse import SparseSlot, add_sparse, rows_of_towers
from towers.system.torch_private import foreach_add_

Leaf = Sequence[Tensor | None]


class TreeSum(Reduction):
    """Sums over the towers, added in the order of a balanced tree (see [Note: trees need whole leaves])."""

    def __init__(self, channel: Communicator) -> None:
        self._channel = channel

    def start(self, bucket: Bucket) -> None:
        """Does nothing, because all buckets are summed together, in :meth:`finish`."""

    def finish(self, buckets: Sequence[Bucket]) -> list[Tensor]:
        self._channel.sum_by_tree([bucket.buffer for bucket in buckets])
        return [bucket.tail for bucket in buckets]

    def reduce_sparse(self, slot: SparseSlot) -> None:
        total = slot.contribution(self._channel)
        if total.is_sparse:
            level = rows_of_towers(self._channel, total)
            while len(level) > 1:
                level = [add_sparse(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
            total = level[0]
        else:
            self._channel.sum_by_tree([total.view(-1)])
        slot.replace(total)


class Subtree:
    """The sum of 2^k leaves, in the memory of k + 1 of them: ``((0 + 1) + (2 + 3)) + …``.

    If the sums of several such subtrees are added in the same way (:class:`TreeSum`), the bits of the total do not
    depend on how the leaves were distributed. Every sum is rounded to the tensors' dtype.
    """

    def __init__(self) -> None:
        self._nodes: list[tuple[int, list[Tensor | None]]] = []

    def add(self, leaf: Leaf) -> None:
        """Adds a leaf: as many tensors as in the other leaves, of their shapes and dtypes. It is kept, and written to.

        None represents zeros. If a tensor is None in all leaves, its sum is None, too.
        """
        height, node = 0, list(leaf)
        while self._nodes and self._nodes[-1][0] == height:
            _, left = self._nodes.pop()
            node = _sum(left, node)
            height += 1
        self._nodes.append((height, node))

    def total(self) -> list[Tensor | None]:
        """Returns the sum of all leaves.

        Raises:
            ValueError: their number is not a power of two.
        """
        if len(self._nodes) != 1:
            raise ValueError("the number of leaves of a subtree must be a power of two")
        return self._nodes[0][1]


def _sum(left: list[Tensor | None], right: list[Tensor | None]) -> list[Tensor | None]:
    sums: list[Tensor | None] = []
    dense: list[tuple[Tensor, Tensor]] = []
    for a, b in zip(left, right, strict=True):
        if a is None or b is None:
            total = b if a is None else a
            if total is not None and not total.is_sparse:
                total.add_(0.0)  # -0 + 0 is 0, the same as with real zeros
        elif a.is_sparse or b.is_sparse:
            total = add_sparse(a, b)
        else:
            total = a
            dense.append((a, b))
        sums.append(total)
    if dense:
        foreach_add_([a for a, _ in dense], [b for _, b in dense])
    return sums
