"""How updated shards of parameters, and the state of their optimizers, reach the other towers.

[Note: two ways to shard] Towers that share memory average their own chunks of the gradients only
(:mod:`towers.gradients.reduce_scatter`), write their shards into each other's parameters, and can read each other's
state alone (:class:`SharedParameters`). All others (GPUs, several hosts) average whole gradients, and gather shards and
state by collectives (:class:`ShardTransport`). :func:`transport_for` decides it, and nothing else in the sharded step
asks for it.

[Note: every tower keeps its parameters] The first design let the towers of a host share one copy of the parameters,
which must then not be updated by code that every tower runs: ``p.data.mul_(0.9)`` leaves no trace that could be
checked, so that would have been a silent error. Instead every tower has parameters of its own, in a shared region, and
writes its shards into the others' during a step only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from towers.collectives.agreement import announce
from towers.collectives.communicator import Communicator, InStep, as_bytes
from towers.collectives.shared_memory.communicator import SharedMemoryCommunicator
from towers.gradients.buckets import DenseSlot
from towers.gradients.cycle import AllReduce, Reduction
from towers.gradients.keys import Keys
from towers.gradients.layout import BucketLayout
from towers.gradients.reduce_scatter import ReduceScatter
from towers.sharding.shards import Shard, ranges
from towers.sharding.state import ReadableState
from towers.system.memory_layout import ALONE, view_like
from towers.system.torch_private import storage_holders


class ShardTransport:
    """Brings shards to the other towers: here by gathering them in one collective.

    Attributes:
        channel: the towers, over which the gradients are averaged.
        reduction: makes the gradients that shards are updated with.
        lazy: completes them, where a tower has averaged its own chunk only.
        state_is_readable: whether a tower alone can read all towers' state.
    """

    state_is_readable: bool = False

    def __init__(self, channel: Communicator) -> None:
        self.reduction: Reduction = AllReduce(channel)
        self.lazy: ReduceScatter | None = None
        self.channel = channel

    def begin(self, purpose: str) -> None:
        """Meet all towers, which are about to do the same, such as "steps Adam".

        Raises:
            DisagreementError: on all towers, when some are about to do something else.
        """
        announce(self.channel, purpose)

    def can_place(self, parameter: Tensor) -> bool:
        """Whether :meth:`place` may be asked for it."""
        return True

    def place(self, slots: Sequence[DenseSlot], layout: BucketLayout, keys: Keys) -> None:
        """Prepare for these parameters; all towers call it after :meth:`begin`.

        Args:
            layout: the buckets.
            keys: keys of the channel's memory.
        """

    def restore_places(self, slots: Sequence[DenseSlot]) -> None:
        """See that they still lie where :meth:`place` has put them: a script may have given them other memory."""

    def gather_gradients(self, slots: Iterable[DenseSlot], *, whole: bool) -> None:
        """See that gradients are there as far as a step needs them; all towers call it.

        Args:
            slots: the sharded parameters'.
            whole: whether the step needs any gradient whole.
        """

    def readable_state(self, key: int) -> ReadableState | None:
        """Where an optimizer keeps its state if a tower alone can read all of it; None where it cannot.

        Args:
            key: the key of its memory.
        """
        return None

    def plan(self, shards: Sequence[Sequence[Shard]]) -> Callable[[], None]:
        """Make what brings every tower's shards to all towers; all call that when each has updated its own.

        Args:
            shards: every tower's; none that is whole.
        """
        sizes = [[shard.nbytes for shard in row] for row in shards]
        longest = max(map(sum, sizes))
        channel, index = self.channel, self.channel.index

        def spread() -> None:
            packed = torch.zeros(longest, dtype=torch.uint8, device=channel.device)
            for piece, shard in zip(packed[: sum(sizes[index])].split(sizes[index]), shards[index], strict=True):
                piece.copy_(as_bytes(shard.of(shard.parameter)))
            for tower, row in enumerate(channel.all_gather(packed)):
                pieces = row[: sum(sizes[tower])].split(sizes[tower])
                for piece, shard in zip(pieces, shards[tower] if tower != index else (), strict=False):
                    here = shard.of(shard.parameter)
                    here.copy_(piece.clone().view(here.dtype).view(here.shape))

        return spread if longest else lambda: None


def transport_for(channel: Communicator) -> ShardTransport:
    """The transport between the towers of ``channel``, over which their gradients are averaged."""
    # see [Note: two ways to shard]
    if isinstance(channel, SharedMemoryCommunicator):
        return SharedParameters(channel)
    return ShardTransport(channel)


class SharedParameters(ShardTransport):
    """Keeps parameters in shared regions, where towers of one host write their shards into each other's.

    A bucket's region holds its parameters as its buffer holds their gradients.
    """

    state_is_readable = True

    def __init__(self, channel: SharedMemoryCommunicator) -> None:
        super().__init__(channel)
        self.reduction: ReduceScatter = ReduceScatter(channel, channel.regions)
        self.lazy = self.reduction
        self._regions = channel.regions
        self._layout: BucketLayout | None = None
        self._keys: dict[int, int] = {}  # by the index of a bucket
        self._addresses = WeakIdKeyDictionary()  # by parameter: where it was put
        self._templates = WeakIdKeyDictionary()  # by parameter: its shape and strides there, without memory

    def begin(self, purpose: str) -> None:
        self.reduction.barrier(purpose)

    def can_place(self, parameter: Tensor) -> bool:
        # Two parameters that share memory would not share it any more.
        return storage_holders(parameter) == ALONE or self._addresses.get(parameter) == parameter.data_ptr()

    def place(self, slots: Sequence[DenseSlot], layout: BucketLayout, keys: Keys) -> None:
        if self._layout is not layout:
            self._layout = layout
            for key in self._keys.values():
                keys.release(key)
            self._keys = {}
            self._addresses, self._templates = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        for bucket in {slot.bucket.index: slot.bucket for slot in slots}.values():
            if bucket.index not in self._keys:
                self._keys[bucket.index] = key = keys.new()
                self._regions.allocate(key, bucket.numel, bucket.dtype)
        self.restore_places(slots)
        self._regions.barrier.wait()  # now all can be mapped

    def restore_places(self, slots: Sequence[DenseSlot]) -> None:
        for slot in slots:
            parameter = slot.parameter()
            assert parameter is not None
            if self._addresses.get(parameter) == parameter.data_ptr() or parameter.dtype != slot.dtype:
                continue  # of another dtype, the buckets are laid out anew
            memory = self._regions.piece(self._keys[slot.bucket.index], slot.start, slot.numel)
            if memory is not None:
                # Its strides stay what they were when it was sharded: state is in their order.
                template = self._templates.setdefault(parameter, parameter.detach().to("meta"))
                place = view_like(template, memory)
                self._addresses[parameter] = place.data_ptr()
                parameter.data = place.copy_(parameter.data)

    def gather_gradients(self, slots: Iterable[DenseSlot], *, whole: bool) -> None:
        if whole or self.reduction.holds_moved_gradient(slots):
            self.reduction.gather()

    def readable_state(self, key: int) -> ReadableState:
        return ReadableState(self._regions, key)

    def plan(self, shards: Sequence[Sequence[Shard]]) -> Callable[[], None]:
        keys = {shard.slot.bucket.index: self._keys[shard.slot.bucket.index] for row in shards for shard in row}
        index = self.channel.index
        local = ranges(shards[index])
        gathering = super().plan

        def spread() -> None:
            """Write this tower's shards into the others' parameters; gather those of buckets that have no region."""
            without = set()
            with InStep(self._regions.barrier):
                for bucket, key in keys.items():
                    tensors = self._regions.map_peers(key)
                    if tensors is None:  # no room for a region on some tower
                        without.add(bucket)
                        continue
                    for start, end in local.get(bucket, ()):
                        for other in (*tensors[:index], *tensors[index + 1 :]):
                            other[start:end].copy_(tensors[index][start:end])
                self._regions.barrier.wait()
                self._regions.close_files()
            if without:
                rest = [[shard for shard in row if shard.slot.bucket.index in without] for row in shards]
                gathering(rest)()

        return spread
