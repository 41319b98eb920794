"""How updated shards of parameters reach the other towers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from towers.collectives.agreement import announce
from towers.collectives.communicator import Communicator, WholeCall, as_bytes
from towers.gradients.averager import GradientAverager
from towers.gradients.buckets import DenseSlot
from towers.sharding.shards import Shard, ranges
from towers.system.memory_layout import ALONE, view_like
from towers.system.torch_private import storage_holders


class Exchange(ABC):
    """A way for shards to reach the other towers."""

    @abstractmethod
    def begin(self, purpose: str) -> None:
        """All towers are about to do something, such as "steps Adam"; returns when all have come.

        Raises:
            DisagreementError: on all towers, when some are about to do something else.
        """

    def can_place(self, parameter: Tensor) -> bool:
        """Whether :meth:`place` may be asked for it."""
        return True

    def place(self, slots: Sequence[DenseSlot]) -> None:  # noqa: B027  (nothing to do is a right default)
        """Prepare for these parameters; all towers, after :meth:`begin`."""

    def bring_back(self, slots: Sequence[DenseSlot]) -> None:  # noqa: B027
        """See that they still lie where :meth:`place` has put them: a script may have given them other memory."""

    @abstractmethod
    def plan(self, shards: Sequence[Sequence[Shard]]) -> Callable[[], None]:
        """What brings every tower's shards to all towers, to be called by all when each has updated its own.

        Args:
            shards: of every tower, cut ones only.
        """


class GatheredParameters(Exchange):
    """Shards are gathered in one collective."""

    def __init__(self, channel: Communicator) -> None:
        self._channel = channel

    def begin(self, purpose: str) -> None:
        announce(self._channel, purpose)

    def plan(self, shards: Sequence[Sequence[Shard]]) -> Callable[[], None]:
        sizes = [[shard.nbytes for shard in own] for own in shards]
        longest = max(map(sum, sizes))
        index = self._channel.index

        def spread() -> None:
            mine = torch.zeros(longest, dtype=torch.uint8, device=self._channel.device)
            for piece, shard in zip(mine.split(_with_rest(sizes[index], longest)), shards[index], strict=False):
                piece.copy_(as_bytes(shard.of(shard.parameter)))
            for tower, row in enumerate(self._channel.all_gather(mine)):
                pieces = row.split(_with_rest(sizes[tower], longest))
                for piece, shard in zip(pieces, shards[tower] if tower != index else (), strict=False):
                    here = shard.of(shard.parameter)
                    here.copy_(piece.clone().view(here.dtype).view(here.shape))

        return spread if longest else lambda: None


def _with_rest(sizes: list[int], total: int) -> list[int]:
    return [*sizes, total - sum(sizes)]


class SharedParameters(Exchange):
    """Parameters in windows: towers of one host write their shards into each other's.

    A bucket's window holds its parameters as its buffer holds their gradients.
    """

    def __init__(self, averager: GradientAverager, channel: Communicator) -> None:
        assert channel.regions is not None
        self._averager = averager
        self._channel = channel
        self._regions = channel.regions
        self._generation = -1
        self._keys: dict[int, int] = {}  # by the index of a bucket
        self._homes = WeakIdKeyDictionary()  # by parameter, the address that it was given
        self._layouts = WeakIdKeyDictionary()  # by parameter, its shape and strides there, without memory

    def begin(self, purpose: str) -> None:
        self._averager.barrier(purpose)

    def can_place(self, parameter: Tensor) -> bool:
        # Two parameters that share memory would not share it any more.
        return storage_holders(parameter) == ALONE or self._homes.get(parameter) == parameter.data_ptr()

    def place(self, slots: Sequence[DenseSlot]) -> None:
        if self._generation != self._averager.generation:
            self._generation = self._averager.generation
            for key in self._keys.values():
                self._averager.release_key(key)
            self._keys = {}
            self._homes, self._layouts = WeakIdKeyDictionary(), WeakIdKeyDictionary()
        for bucket in {slot.bucket.index: slot.bucket for slot in slots}.values():
            if bucket.index not in self._keys:
                self._keys[bucket.index] = key = self._averager.new_key()
                self._regions.allocate(key, bucket.numel, bucket.dtype)
        self.bring_back(slots)
        self._regions.barrier.wait()  # now all can be reached

    def bring_back(self, slots: Sequence[DenseSlot]) -> None:
        for slot in slots:
            parameter = slot.parameter
            assert parameter is not None
            if self._homes.get(parameter) == parameter.data_ptr() or parameter.dtype != slot.dtype:
                continue  # of another dtype, the buckets are laid out anew
            memory = self._regions.piece(self._keys[slot.bucket.index], slot.start, slot.numel)
            if memory is not None:
                # Its strides stay what they were when it was cut: state is in their order.
                layout = self._layouts.setdefault(parameter, parameter.detach().to("meta"))
                home = view_like(layout, memory)
                self._homes[parameter] = home.data_ptr()
                parameter.data = home.copy_(parameter.data)

    def plan(self, shards: Sequence[Sequence[Shard]]) -> Callable[[], None]:
        keys = {shard.slot.bucket.index: self._keys[shard.slot.bucket.index] for own in shards for shard in own}
        index = self._channel.index
        mine = ranges(shards[index])

        def spread() -> None:
            with WholeCall(self._regions.barrier):
                without = write()
            if without:
                rest = [[shard for shard in own if shard.slot.bucket.index in without] for own in shards]
                GatheredParameters(self._channel).plan(rest)()

        def write() -> set[int]:
            """Write this tower's shards into the others' parameters; returns the buckets that have no window."""
            without = set()
            for bucket, key in keys.items():
                tensors = self._regions.map_peers(key)
                if tensors is None:  # no room for a window on some tower
                    without.add(bucket)
                    continue
                for start, end in mine.get(bucket, ()):
                    for other in (*tensors[:index], *tensors[index + 1 :]):
                        other[start:end].copy_(tensors[index][start:end])
            self._regions.barrier.wait()
            self._regions.close_files()
            return without

        return spread
