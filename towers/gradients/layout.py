"""The parameters whose gradients are averaged, and the bucket of each gradient."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from towers.collectives.communicator import Communicator
from towers.gradients.buckets import Bucket, DenseSlot, distribute
from towers.gradients.slots import Slot
from towers.gradients.sparse import SparseSlot
from towers.system.memory_layout import gradient_dtype
from towers.system.named import Named


class BucketLayout:
    """Slots for the gradients of some parameters. Dense gradients are in buckets, sparse ones are separate.

    Args:
        bucket_bytes: size of a bucket.

    Attributes:
        buckets: the buckets of the dense gradients.
        dense, sparse, slots: the slots of either kind, and all slots.
        units: the number of buckets and sparse gradients.
        trainable_units: for each unit, whether any of its parameters was trainable when it was laid out.
    """

    def __init__(self, parameters: Sequence[Named], bucket_bytes: int) -> None:
        self._names = [named.name for named in parameters]
        self.buckets: list[Bucket] = distribute([n for n in parameters if not n.sparse], bucket_bytes)
        self.dense: list[DenseSlot] = [slot for bucket in self.buckets for slot in bucket.slots]
        self.sparse = [SparseSlot(named) for named in parameters if named.sparse]
        self.slots: list[Slot] = [*self.dense, *self.sparse]
        self.units = len(self.buckets) + len(self.sparse)
        for bucket in self.buckets:
            bucket.units = self.units
        self.trainable_units = [any(slot.trainable for slot in bucket.slots) for bucket in self.buckets]
        self.trainable_units += [slot.trainable for slot in self.sparse]
        self._by_id = {id(slot.parameter()): slot for slot in self.slots}

    def trainable(self) -> tuple[int, ...]:
        """Returns the indices of the buckets that a first backward may have gradients for."""
        return tuple(bucket.index for bucket in self.buckets if self.trainable_units[bucket.index]) or (0,)

    def touched(self) -> list[bool]:
        """Returns for each unit whether this tower has its own contribution."""
        dense = [any(slot.fresh for slot in bucket.slots) for bucket in self.buckets]
        return dense + [slot.fresh for slot in self.sparse]

    def thawed(self, touched: Sequence[bool]) -> str | None:
        """Returns a parameter of a unit that is touched, but was not trainable when it was laid out; or None."""
        units = [bucket.slots for bucket in self.buckets] + [[slot] for slot in self.sparse]
        for slots, here, trainable in zip(units, touched, self.trainable_units, strict=True):
            if here and not trainable:
                return slots[0].name
        return None

    def slot_of(self, parameter: Tensor) -> Slot | None:
        """Returns a parameter's slot, or None."""
        slot = self._by_id.get(id(parameter))
        return slot if slot is not None and slot.parameter() is parameter else None

    def slots_of(self, parameters: Iterable[Tensor]) -> Iterator[Slot]:
        """Returns the slots of those parameters that have one."""
        return (slot for parameter in parameters if (slot := self.slot_of(parameter)) is not None)

    def converted(self) -> str | None:
        """Returns a parameter that was converted or moved since, with its present dtype and device; or None."""
        for slot in self.slots:
            now = slot.parameter()
            if now is not None and (gradient_dtype(now) != slot.dtype or now.device != slot.device):
                return f"parameter {slot.name}, now {gradient_dtype(now)} on {now.device}"
        return None

    def kept(self, channel: Communicator) -> list[Named]:
        """Returns the parameters that still exist on any tower, in the order of their addition. All towers call it.

        A parameter that exists only on others (they keep a model that this tower has dropped) keeps its place here.
        """
        slots = {slot.name: slot for slot in self.slots}
        local = bytes(slots[name].parameter() is not None for name in self._names)
        everybody = channel.all_gather_bytes(local) if self._names else []
        kept = []
        for name, *alive in zip(self._names, *everybody, strict=True):
            slot = slots[name]
            if any(alive):
                tensor = slot.parameter()
                if tensor is None:
                    tensor = torch.empty(slot.shape, dtype=slot.dtype, device=channel.device)
                kept.append(Named(name, tensor, "parameter", slot.trainable, isinstance(slot, SparseSlot)))
        return kept

    def in_order_of(self, arrivals: Sequence[str], channel: Communicator) -> list[Named] | None:
        """Returns the parameters of :meth:`kept`, ordered so that buckets fill in the order of ``arrivals``.

        Returns None if they already have that order.

        Args:
            arrivals: names in the order in which gradients arrived, the same on all towers. Other parameters follow
                them.
        """
        places = {name: place for place, name in enumerate(arrivals)}
        names = sorted(self._names, key=lambda name: -places.get(name, len(places)))  # a layout starts with the last
        if names == self._names:
            return None
        kept = {named.name: named for named in self.kept(channel)}
        return [kept[name] for name in names if name in kept]
