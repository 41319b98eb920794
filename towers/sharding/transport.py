"""Sends updated shards of parameters, and the state of their optimizers, to the other towers.

[Note: every tower keeps its parameters] Towers that shared one copy of the parameters could not each update it with the
script's code, such as ``p.data.mul_(0.9)``. Here, every tower has its own parameters, in a shared region, and writes
its shards into the others' only during a step. Central storage (:mod:`towers.sharding.central`) has one copy, and a
view of it for each tower that keeps the tower's own writes.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from towers.collectives.agreement import RepeatedCalls, announce
from towers.collectives.communicator import Communicator, InStep, as_bytes
from towers.collectives.process_group import ProcessGroupCommunicator
from towers.collectives.shared_memory.communicator import SharedMemoryCommunicator
from towers.gradients.buckets import Bucket, BucketLayout, DenseSlot, Keys, Slot
from towers.gradients.reductions import AllReduce, ReduceScatter, Reduction, ScatteredChunks, SharedChunks
from towers.sharding.shards import Shard, ranges
from towers.sharding.state import ReadableState
from towers.system.tensors import ALONE, view_like
from towers.system.torch_private import foreach_copy_, storage_holders

_UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""By the size in bytes of the smallest elements to send: the dtype in which all of them are copied."""


class ShardTransport:
    """Sends shards to the other towers: in this class, by gathering them in one collective.

    Attributes:
        channel: the towers, over which the gradients are averaged.
        reduction: computes the gradients with which shards are updated.
        lazy: completes them, if a tower has averaged only its own chunk; otherwise None.
        state_is_readable: whether a single tower can read all towers' state.
        takes_sparse: whether parameters with sparse gradients can be sharded.
        state_device: the device of the state in ``state_dict()``. None: the device where the optimizer keeps it.
        feature, remedy: the name and the advice in errors.
    """

    state_is_readable: bool = False
    takes_sparse: bool = False
    state_device: torch.device | None = None
    feature, remedy = "shard_optimizer=True", "leave shard_optimizer out"

    def __init__(self, channel: Communicator) -> None:
        self.reduction: Reduction = AllReduce(channel)
        self.lazy: ReduceScatter | None = None
        self.channel = channel

    def barrier(self, purpose: str) -> None:
        """Meets all towers, which are about to do the same, such as "reaches check_mirrored()".

        Raises:
            DisagreementError: on all towers, if some are about to do something different.
        """
        announce(self.channel, purpose)

    def begin(self, purpose: str, parameters: Iterable[Tensor]) -> None:
        """Calls :meth:`barrier` for a step of parameters, such as "steps Adam".

        The script must not change the parameters from then on.
        """
        self.barrier(purpose)

    def can_place(self, parameter: Tensor) -> bool:
        """Returns whether :meth:`place` supports the parameter."""
        return True

    def place(self, slots: Sequence[Slot], layout: BucketLayout, keys: Keys) -> None:
        """Prepares for these parameters. All towers call it after :meth:`begin`.

        Args:
            layout: the buckets.
            keys: keys of the channel's memory.
        """

    def restore_places(self, slots: Sequence[Slot]) -> None:
        """Moves parameters back to the places from :meth:`place`, if a script has given them other memory."""

    def home(self, shard: Shard) -> Tensor:
        """Returns the memory in which the inner optimizer updates a shard of a placed parameter."""
        return shard.of(shard.parameter)

    def load(self, shards: Sequence[Shard], parameters: Sequence[nn.Parameter]) -> None:
        """Gives the inner optimizer's parameters, one for each of this tower's shards, their values and gradients."""
        for shard, parameter in zip(shards, parameters, strict=True):
            outer = shard.parameter
            if not shard.is_at(parameter, outer):  # a script has given the parameter other memory
                parameter.data = shard.of(outer)
            parameter.grad = shard.gradient()

    def gather_gradients(self, slots: Iterable[Slot], *, whole: bool) -> None:
        """Gathers gradients as far as a step needs them. All towers call it.

        Args:
            slots: the sharded parameters'.
            whole: whether the step needs any gradient whole.
        """
        if self.lazy is not None and (whole or self.lazy.holds_moved_gradient(slots)):
            self.lazy.gather()

    def readable_state(self, key: int) -> ReadableState | None:
        """Returns the memory of an optimizer's state that a single tower can read completely, or None if there is none.

        Args:
            key: the key of its memory.
        """
        return None

    def release(self, key: int) -> None:
        """Forgets the memory of :meth:`readable_state` under ``key``."""
        self.channel.release(key)

    def plan(self, shards: Sequence[Sequence[Shard]]) -> Callable[[], None]:
        """Returns a function that sends every tower's shards to all towers.

        All towers call that function after they have updated their own shards.

        Args:
            shards: every tower's, without whole ones.
        """
        every = [shard for row in shards for shard in row]
        unit = _UNITS[min((shard.slot.dtype.itemsize for shard in every), default=1)]
        sizes = [[shard.nbytes // unit.itemsize for shard in row] for row in shards]
        longest = max(map(sum, sizes))
        channel, index = self.channel, self.channel.index

        def places(towers: Iterable[int]) -> list[Tensor]:
            return [as_bytes(shard.of(shard.parameter)).view(unit) for tower in towers for shard in shards[tower]]

        def pieces(row: Tensor, tower: int) -> list[Tensor]:
            return list(row[: sum(sizes[tower])].split(sizes[tower]))

        def spread() -> None:
            packed = torch.empty(longest, dtype=unit, device=channel.device)
            if shards[index]:
                foreach_copy_(pieces(packed, index), places([index]))
            rows = channel.all_gather(packed.view(torch.uint8)).view(unit)
            others = [tower for tower in range(channel.size) if tower != index]
            if here := places(others):
                foreach_copy_(here, [piece for tower in others for piece in pieces(rows[tower], tower)])

        return spread if longest else lambda: None


class PlacedParameters(ShardTransport):
    """Keeps the parameters of a bucket in one memory, in the same order as the bucket's buffer has their gradients."""

    def __init__(self, channel: Communicator) -> None:
        super().__init__(channel)
        self._layout: BucketLayout | None = None
        self._addresses = WeakIdKeyDictionary()  # by parameter: its address there
        self._templates = WeakIdKeyDictionary()  # by parameter: its shape and strides there, without memory

    def can_place(self, parameter: Tensor) -> bool:
        # Two parameters that share memory would no longer share it.
        return storage_holders(parameter) == ALONE or self._addresses.get(parameter) == parameter.data_ptr()

    def place(self, slots: Sequence[Slot], layout: BucketLayout, keys: Keys) -> None:
        if self._layout is not layout:
            self._layout = layout
            self.drop_memory(keys)
            self._addresses, self._templates = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        for slot in _dense(slots):
            self.allocate(slot.bucket, keys)
            if not self.is_placed(slot):
                self._move(slot)

    @abstractmethod
    def drop_memory(self, keys: Keys) -> None:
        """Drops the memory of the previous layout's buckets."""

    @abstractmethod
    def allocate(self, bucket: Bucket, keys: Keys) -> None:
        """Allocates memory for a bucket's parameters, if there is none."""

    @abstractmethod
    def memory_of(self, slot: DenseSlot) -> Tensor | None:
        """Returns a parameter's part of its bucket's memory; None: it stays where it is."""

    def restore_places(self, slots: Sequence[Slot]) -> None:
        for slot in _dense(slots):
            parameter = slot.parameter()
            assert parameter is not None
            if self._addresses.get(parameter) not in (None, parameter.data_ptr()):
                self._move(slot)

    def _move(self, slot: DenseSlot) -> None:
        parameter, memory = slot.parameter(), self.memory_of(slot)
        assert parameter is not None
        if memory is not None and parameter.dtype == slot.dtype:  # with another, the buckets are laid out again
            # It keeps the strides that it had when it was sharded, because its state is in their order.
            template = self._templates.setdefault(parameter, parameter.detach().to("meta"))
            place = view_like(template, memory)
            self._addresses[parameter] = place.data_ptr()
            parameter.data = place.copy_(parameter.data)

    def is_placed(self, slot: DenseSlot) -> bool:
        """Returns whether a parameter is in its bucket's memory."""
        parameter = slot.parameter()
        return parameter is not None and self._addresses.get(parameter) == parameter.data_ptr()


class GatheredParameters(PlacedParameters):
    """Keeps parameters on an accelerator, where one collective for each bucket sends all towers' shards, in place.

    The host does not wait for other hosts in a step that it repeats (:class:`RepeatedCalls`).

    A parameter that shares its memory on some tower, such as the weights of an RNN of cuDNN, stays where it is. The
    shards of its bucket are then packed and gathered, as in the base class.

    Args:
        calls: compares calls with the other towers.
    """

    def __init__(self, channel: ProcessGroupCommunicator, calls: RepeatedCalls) -> None:
        super().__init__(channel)
        self.reduction = self.lazy = ScatteredChunks(channel, calls)
        self._group = channel
        self._calls = calls
        self._memory: dict[int, Tensor] = {}  # by the index of a bucket
        self._placed: set[int] = set()  # buckets whose sharded parameters are all in that memory, on all towers

    def barrier(self, purpose: str) -> None:
        self._calls.compare(purpose)

    def can_place(self, parameter: Tensor) -> bool:
        return True

    def place(self, slots: Sequence[Slot], layout: BucketLayout, keys: Keys) -> None:
        dense = _dense(slots)
        alone = super().can_place
        super().place([slot for slot in dense if (p := slot.parameter()) is not None and alone(p)], layout, keys)
        elsewhere = {slot.bucket.index for slot in dense if not self.is_placed(slot)}
        anywhere = {index for indices in self.channel.all_gather_json(sorted(elsewhere)) for index in indices}
        self._placed = {slot.bucket.index for slot in dense} - anywhere

    def drop_memory(self, keys: Keys) -> None:
        self._memory = {}

    def allocate(self, bucket: Bucket, keys: Keys) -> None:
        if bucket.index not in self._memory:
            numel = bucket.padded_numel(self.channel.size)
            self._memory[bucket.index] = torch.zeros(numel, dtype=bucket.dtype, device=bucket.device)

    def memory_of(self, slot: DenseSlot) -> Tensor:
        return self._memory[slot.bucket.index][slot.start : slot.start + slot.numel]

    def plan(self, shards: Sequence[Sequence[Shard]]) -> Callable[[], None]:
        placed = self._placed & set(ranges([shard for row in shards for shard in row]))
        buckets = [self._memory[index] for index in sorted(placed)]
        rest = [[shard for shard in row if placed.isdisjoint(ranges([shard]))] for row in shards]
        gathering = super().plan(rest)

        def spread() -> None:
            for memory in buckets:
                self._group.gather_chunks(memory)
            gathering()

        return spread


class SharedParameters(PlacedParameters):
    """Keeps parameters in shared regions, where towers of one host write their shards into each other's."""

    state_is_readable = True

    def __init__(self, channel: SharedMemoryCommunicator) -> None:
        super().__init__(channel)
        self.reduction = self.lazy = self._chunks = SharedChunks(channel, channel.regions)
        self._regions = channel.regions
        self._keys: dict[int, int] = {}  # by the index of a bucket

    def barrier(self, purpose: str) -> None:
        self._chunks.barrier(purpose)

    def place(self, slots: Sequence[Slot], layout: BucketLayout, keys: Keys) -> None:
        super().place(slots, layout, keys)
        self._regions.barrier.wait()  # now all regions can be mapped

    def drop_memory(self, keys: Keys) -> None:
        for key in self._keys.values():
            keys.release(key)
        self._keys = {}

    def allocate(self, bucket: Bucket, keys: Keys) -> None:
        if bucket.index not in self._keys:
            self._keys[bucket.index] = key = keys.new()
            self._regions.allocate(key, bucket.numel, bucket.dtype)

    def memory_of(self, slot: DenseSlot) -> Tensor | None:
        return self._regions.piece(self._keys[slot.bucket.index], slot.start, slot.numel)

    def readable_state(self, key: int) -> ReadableState:
        return ReadableState(self._regions, key)

    def plan(self, shards: Sequence[Sequence[Shard]]) -> Callable[[], None]:
        keys = {bucket: self._keys[bucket] for row in shards for bucket in ranges(row)}
        index = self.channel.index
        local = ranges(shards[index])
        gathering = super().plan

        def spread() -> None:
            """Writes this tower's shards into the others' parameters. Gathers shards of buckets without a region."""
            without = set()
            with InStep(self._regions.barrier):
                for bucket, key in keys.items():
                    tensors = self._regions.map_peers(key)
                    if tensors is None:  # some tower has no memory for a region
                        without.add(bucket)
                        continue
                    for start, end in local.get(bucket, ()):
                        for other in (*tensors[:index], *tensors[index + 1 :]):
                            other[start:end].copy_(tensors[index][start:end])
                self._regions.barrier.wait()
                self._regions.close_files()
            if without:
                rest = [[shard for shard in row if not without.isdisjoint(ranges([shard]))] for row in shards]
                gathering(rest)()

        return spread


def _dense(slots: Iterable[Slot]) -> list[DenseSlot]:
    return [slot for slot in slots if isinstance(slot, DenseSlot)]
