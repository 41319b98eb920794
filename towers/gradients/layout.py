"""Which parameters' gradients are averaged, and where each of them travels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from towers.collectives.communicator import Communicator
from towers.gradients.buckets import Bucket, DenseSlot, lay_out
from towers.gradients.pairing import FLAGS
from towers.gradients.slots import Slot
from towers.gradients.sparse import SparseSlot
from towers.mirroring.mirror import Named
from towers.system.memory_layout import gradient_dtype


class Layout:
    """Slots for the gradients of some parameters: in buckets, and of sparse gradients by themselves.

    Attributes:
        buckets: of the dense ones.
        dense, sparse, slots: the slots of either kind, and all.
    """

    def __init__(self, parameters: Sequence[Named], bucket_bytes: int) -> None:
        self._names = [named.name for named in parameters]
        self.buckets: list[Bucket] = lay_out([named for named in parameters if not named.sparse], bucket_bytes)
        self.dense: list[DenseSlot] = [slot for bucket in self.buckets for slot in bucket.slots]
        self.sparse = [SparseSlot(named) for named in parameters if named.sparse]
        self.slots: list[Slot] = [*self.dense, *self.sparse]
        self._by_id = {id(slot.parameter): slot for slot in self.slots}
        self._kinds = self._present_kinds()

    @property
    def units(self) -> int:
        """How many buckets and sparse gradients there are."""
        return len(self.buckets) + len(self.sparse)

    @property
    def closing(self) -> int:
        """How many flags the bucket that closes a backward carries."""
        return self.units + FLAGS

    def trainable(self) -> tuple[int, ...]:
        """Indices of the buckets that a first backward may bring gradients for."""
        return tuple(bucket.index for bucket in self.buckets if any(slot.trainable for slot in bucket.slots)) or (0,)

    def touched(self) -> list[bool]:
        """For which units this tower has something of its own to contribute."""
        return [bucket.has_fresh for bucket in self.buckets] + [slot.fresh for slot in self.sparse]

    def slot_of(self, parameter: Tensor) -> Slot | None:
        """A parameter's slot, if it has one."""
        slot = self._by_id.get(id(parameter))
        return slot if slot is not None and slot.parameter is parameter else None

    def converted(self) -> str | None:
        """A parameter that was converted or moved since, and what it is now; None where none was."""
        kinds = zip(self.slots, self._present_kinds(), self._kinds, strict=True)
        for slot, now, before in kinds:
            if now is not None and now != before:
                return f"parameter {slot.name}, now {now[0]} on {now[1]}"
        return None

    def _present_kinds(self) -> list[tuple[torch.dtype, torch.device] | None]:
        parameters = (slot.parameter for slot in self.slots)
        return [None if p is None else (gradient_dtype(p), p.device) for p in parameters]

    def kept(self, channel: Communicator) -> list[Named]:
        """The parameters that still live on any tower, in the order they were added; all towers call it.

        One that lives on others only (they keep a model that this tower has dropped) keeps its place here.
        """
        slots = {slot.name: slot for slot in self.slots}
        mine = bytes(slots[name].parameter is not None for name in self._names)
        everybody = channel.all_gather_bytes(mine) if self._names else []
        kept = []
        for name, *alive in zip(self._names, *everybody, strict=True):
            slot = slots[name]
            if any(alive):
                tensor = slot.parameter
                if tensor is None:
                    tensor = torch.empty(slot.shape, dtype=slot.dtype, device=channel.device)
                kept.append(Named(name, tensor, "parameter", slot.trainable, isinstance(slot, SparseSlot)))
        return kept

    def in_order_of(self, arrivals: Sequence[str], channel: Communicator) -> list[Named] | None:
        """What is :meth:`kept`, so ordered that buckets fill as ``arrivals`` came; None where it is so already.

        Args:
            arrivals: names as gradients came, the same on all towers; what has not come follows.
        """
        places = {name: place for place, name in enumerate(arrivals)}
        names = sorted(self._names, key=lambda name: -places.get(name, len(places)))  # the last come first in a layout
        if names == self._names:
            return None
        kept = {named.name: named for named in self.kept(channel)}
        return [kept[name] for name in names if name in kept]
