"""Ways to reduce packed buckets: an all-reduce, half of one, or a sum by a tree; and a script's own gradients.

The default is an all-reduce (:class:`AllReduce`). With a sharded optimizer step, a tower needs the average of only its
own chunk of each bucket. So the all-reduce stops half-way (:class:`ReduceScatter`): tower i averages the i-th chunk of
every bucket into its own memory. The rest of a gradient is gathered when it is used (:class:`LazyGradient`): to clip,
to log, or to step an optimizer of another kind. A script that does so pays the costs of the unsharded step; any other
script pays half of them. Towers that share memory read each other's buckets (:class:`SharedChunks`). GPUs have a
collective (:class:`ScatteredChunks`), which does not reduce the tails: their flags go to all towers, in one small
all-reduce for all buckets of a backward. Virtual towers need sums in the order of a balanced binary tree, within a
tower (:class:`Subtree`) and over the towers (:class:`TreeSum`).

[Note: where the mean is taken] Through Gloo, gradients are multiplied by 1/N on the way into the bucket, as in DDP,
instead of divided after the sum. This saves one pass over memory (1.9 ms of a 75 ms step for 10 million parameters on
one core), and gives the bits of DDP with the same buckets. If N is a power of two, both give the same bits. NCCL takes
gradients unchanged and multiplies as it reads them (``ReduceOp.AVG``). Shared memory multiplies piece by piece, in the
cache.

[Note: deferred barrier] The owner of a bucket may write to it again only after the towers that have reduced from it
have reached the next barrier. ``SharedChunks.finish`` does not call that barrier: the next operation does, which mostly
is the optimizer's step. If it is another operation, :meth:`SharedChunks.complete` calls the barrier.

[Note: trees need whole leaves] Virtual towers' gradients are summed when all of them are computed, not while the last
one's backward runs, because a tree needs complete leaves. On CPUs, this loses no time. On GPUs, communication is not
hidden behind the last backward. The buckets, the usage flags and the shared memory are those of averaging.

[Note: a script's own gradients] ``torch.autograd.grad`` runs no hooks of parameters, so its results are each tower's
own. They are averaged on request, in one announced call. A digest compares shapes and dtypes. One digit per gradient
shows whether this tower has one, and another digit whether it is dense. An average with a graph would need a collective
in the backward through it, which towers reach at different times.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from towers.collectives.agreement import RepeatedCalls, announce
from towers.collectives.arithmetic import chunk_of
from towers.collectives.communicator import Communicator, InStep, Pending
from towers.collectives.process_group import ProcessGroupCommunicator
from towers.collectives.shared_memory.regions import Regions
from towers.collectives.values import together
from towers.errors import DisagreementError
from towers.gradients.buckets import Bucket, DenseSlot, Slot, SparseSlot, handles_gradients
from towers.gradients.sparse import add_sparse, average_rows, has_rows, rows_of_towers, to_dense, without_rows
from towers.system import tree as trees
from towers.system.messages import digest_of
from towers.system.tensors import gradient_dtype
from towers.system.torch_private import DisableTorchFunctionSubclass, disable_dynamo, foreach_add_

_USES = "uses the averaged gradients, or keeps them until another backward starts"
Leaf = Sequence[Tensor | None]


class Reduction(ABC):
    """Reduces packed buckets over all towers, which make the same calls in the same order.

    Attributes:
        scale: the factor for gradients on their way into the buckets (see [Note: where the mean is taken]).
    """

    scale: float = 1.0

    @abstractmethod
    def start(self, bucket: Bucket) -> None:
        """Takes a packed bucket. It is reduced in parallel with the backward if possible, or in :meth:`finish`."""

    @abstractmethod
    def finish(self, buckets: Sequence[Bucket]) -> list[Tensor]:
        """Waits until all started buckets are reduced (on a GPU: for later work).

        Args:
            buckets: the started buckets, in order.

        Returns:
            Every tail's sum over the towers, or its mean. It is zero if no tower has set a flag.
        """

    @abstractmethod
    def reduce_sparse(self, slot: SparseSlot) -> None:
        """Reduces a sparse gradient. The result is dense if some tower's gradient is, otherwise it is coalesced."""


class AllReduce(Reduction):
    """Averages buckets with all-reduces.

    The communicator decides when they run: through c10d in parallel with the backward, and in shared memory in place
    and all together when they are awaited (see [Note: copied at once] in :mod:`towers.gradients.buckets`).
    """

    def __init__(self, channel: Communicator) -> None:
        self.scale = channel.prescale
        self._channel = channel
        self._pending: list[Pending] = []

    def start(self, bucket: Bucket) -> None:
        """Submits a bucket. This starts its all-reduce through c10d, and queues it in shared memory."""
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


# -- half an all-reduce -----------------------------------------------------------------------------------

_DESCRIBING = frozenset(
    getattr(Tensor, name).__get__ for name in ("device", "grad_fn", "is_leaf", "is_sparse", "layout", "requires_grad")
)
"""Attributes of a gradient that can be read without gathering it.

The shape is not among them: code that reads it is about to read the memory without a call that could be intercepted.
"""


class LazyGradient(Tensor):
    """A gradient of which this tower holds only the average of this tower's chunk.

    It is otherwise an ordinary tensor. Any operation on it first gathers the rest, with a collective. Then it becomes
    an ordinary tensor itself, for all holders. Only code that does not call Python's overrides cannot be detected:
    constructors (``torch.tensor``, ``torch.Tensor``, ``new_tensor``, ``torch.autograd.Variable``,
    ``torch.sparse_coo_tensor``, ``torch.nested.nested_tensor``), ``set_``, ``torch.utils.swap_tensors``,
    ``torch.utils.dlpack.to_dlpack``, transforms of ``torch.func``, scripted functions, and custom C++.
    """

    _gather: Callable[[], None]

    def as_subclass(self, cls: Any) -> Any:
        self._gather()  # torch does not call __torch_function__ here
        return Tensor.as_subclass(self, cls)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in _DESCRIBING:
            for value in trees.leaves((args, kwargs)):
                if isinstance(value, LazyGradient):
                    value._gather()
        with DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


def make_lazy(gradient: Tensor, gather: Callable[[], None]) -> None:
    """Makes a gradient, in place, one that calls ``gather`` before its values are used."""
    gradient.__class__ = LazyGradient
    gradient._gather = gather  # type: ignore[attr-defined]


def make_ordinary(gradient: Tensor) -> None:
    """Makes a lazily gathered gradient, in place, an ordinary tensor from now on."""
    if isinstance(gradient, LazyGradient):
        del gradient._gather
        gradient.__class__ = Tensor  # type: ignore[assignment]


class ReduceScatter(AllReduce):
    """Averages this tower's chunks of buckets, and completes their gradients on demand."""

    def __init__(self, channel: Communicator) -> None:
        super().__init__(channel)
        self._lazy: list[DenseSlot] = []  # whose gradients were averaged last
        self._reduced: list[Bucket] = []  # theirs, until they are gathered or dropped

    @handles_gradients
    def defer_rest(self) -> None:
        for bucket in self._reduced:
            for slot in bucket.slots:
                if slot.gradient is slot.given:
                    make_lazy(slot.given, self.gather)
                    self._lazy.append(slot)

    def complete(self) -> None:
        if any(bucket.is_held for bucket in self._reduced):
            self.gather()
        self._reduced = []
        self._make_ordinary()

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
        self._make_ordinary()

    @abstractmethod
    def _fetch(self, buckets: Sequence[Bucket], agreed: bool) -> None:
        """Gets the other towers' chunks. If the towers have not ``agreed`` to do so, it compares their calls."""

    def holds_moved_gradient(self, slots: Iterable[Slot]) -> bool:
        """Returns whether a lazily gathered gradient has been given to another parameter, among those of ``slots``."""
        own = {id(slot): slot.given for slot in self._lazy}
        return any(isinstance(g := slot.gradient, LazyGradient) and g is not own.get(id(slot)) for slot in slots)

    def _make_ordinary(self) -> None:
        for slot in self._lazy:
            make_ordinary(slot.given)
        self._lazy = []


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


# -- sums by a tree ---------------------------------------------------------------------------------------


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


# -- a script's own gradients -----------------------------------------------------------------------------


@torch.no_grad()
def average(
    comm: Communicator,
    call: str,
    tensors: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    name_of: Callable[[Tensor], str],
) -> list[Tensor | None]:
    """Returns the mean over the towers of every gradient. All towers call it.

    Args:
        call: the call's name in messages; the same on all towers.
        tensors: the tensors of the gradients, with the same shapes and dtypes in the same order on all towers.
        gradients: dense or sparse. None counts as zero if another tower has a gradient.
        name_of: returns a tensor's name in messages.

    Returns:
        New tensors, which are sparse if no tower's gradient is dense; None if no tower has a gradient.

    Raises:
        DisagreementError: on all towers, if some make another call or give other tensors.
    """
    kinds = [[str(gradient_dtype(tensor)), list(tensor.shape)] for tensor in tensors]
    digest = digest_of(kinds)
    local = [
        digest,
        _mask([g is not None for g in gradients]),
        _mask([g is not None and not has_rows(g) for g in gradients]),
    ]
    towers = announce(comm, call, local)
    if any(other != digest for other, _, _ in towers):
        raise _difference(comm, call, [[name_of(t), *kind] for t, kind in zip(tensors, kinds, strict=True)])
    means: list[Tensor | None] = [None] * len(tensors)
    dense: dict[int, Tensor] = {}
    with InStep(comm):
        for i, (tensor, gradient) in enumerate(zip(tensors, gradients, strict=True)):
            if all(present[i] == "0" for _, present, _ in towers):
                continue
            if any(is_dense[i] == "1" for _, _, is_dense in towers):
                dense[i] = _densely(tensor, gradient)
            else:
                nothing = without_rows(tensor.shape, gradient_dtype(tensor), tensor.device)
                means[i] = average_rows(comm, nothing if gradient is None else gradient)
        for i, mean in zip(dense, together(list(dense.values()), partial(average_flat, comm)), strict=True):
            means[i] = mean
    return means


def _mask(flags: Sequence[bool]) -> str:
    return "".join("1" if flag else "0" for flag in flags)


def _densely(tensor: Tensor, gradient: Tensor | None) -> Tensor:
    if gradient is None:
        return torch.zeros(tensor.shape, dtype=gradient_dtype(tensor), device=tensor.device)
    return to_dense(gradient) if gradient.is_sparse else gradient


def average_flat(comm: Communicator, flat: Tensor) -> None:
    """Averages a flat tensor over the towers, in place."""
    real = torch.view_as_real(flat).view(-1) if flat.is_complex() else flat
    comm.submit_average(real.mul_(comm.prescale)).wait()


def _difference(comm: Communicator, call: str, described: Sequence[Sequence[object]]) -> DisagreementError:
    """Returns the error of towers that give different tensors, with one message on all of them. All towers call it."""
    towers = comm.all_gather_json(described)
    advice = "every tower must give the same tensors in the same order"
    for tower, other in enumerate(towers):
        if len(other) != len(towers[0]):
            return DisagreementError(
                f"{call}: {len(towers[0])} gradients on tower 0, but {len(other)} on tower {tower}; {advice}"
            )
        for (name, dtype, shape), (_, other_dtype, other_shape) in zip(towers[0], other, strict=True):
            if [dtype, shape] != [other_dtype, other_shape]:
                return DisagreementError(
                    f"{call}: the gradient of {name} is {dtype} of shape {tuple(shape)} on tower 0, but {other_dtype} "
                    f"of shape {tuple(other_shape)} on tower {tower}; {advice}"
                )
    return DisagreementError(f"{call}: the towers gave different tensors; {advice}")
