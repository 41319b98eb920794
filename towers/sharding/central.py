"""Central storage: one copy of parameters and their optimizers' state in the memory of a host, for all its towers.

Each tower updates its shards of the parameters in place, as with ``shard_optimizer=True``, and need not write them to
the others. On CPU towers, the model's parameters are that memory ([Note: one copy, and what a script writes] in
:mod:`towers.sharding.single_copy`). On accelerators, a step consists of the following, and no optimizer state is on
them::

    backward                gradients are averaged as usual
    barrier                 all towers have reached the step
    load                    each tower copies its shards of parameters and gradients to the host
    inner.step()            updates the shards there
    barrier                 all parameters are complete
    spread                  each tower copies all parameters to its device

[Note: devices hold the current values] The shards are copied to the host in every step, even if they are still there
from the last one, because a script may have changed the device's. They are one N-th of the data that is copied back.

[Note: rows of tables] Querying the kernel for the pages of a large table takes longer than updating the few rows that a
step has used. So a table's pages are queried when its version shows that it was written to, and in every 64th step, to
save memory. Values that a script has written only through ``table.data`` count without that: each tower takes the
values of its rows from the model's table before it updates them, and writes them back if the table has its own pages.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from towers.collectives.arithmetic import CHUNK_ALIGNMENT
from towers.collectives.communicator import Communicator, PeerGroup
from towers.collectives.shared_memory.communicator import SEVERAL_HOSTS, SharedMemoryCommunicator, join
from towers.errors import StartupError
from towers.gradients.buckets import BucketLayout, Keys, Slot, SparseSlot
from towers.gradients.reductions import SharedChunks
from towers.sharding.shards import RowShard, Shard
from towers.sharding.single_copy import SingleCopy, allocate, give_back_freed_memory
from towers.sharding.state import ReadableState
from towers.sharding.transport import ShardTransport
from towers.system.host_copy import HostCopy, on_device
from towers.system.memory_layout import ALONE
from towers.system.torch_private import storage_holders

_HOST = torch.device("cpu")
_ASK_AGAIN = 64  # steps


class _OnHost(PeerGroup):
    """Towers on accelerators, as processes of their host."""

    def __init__(self, towers: Communicator) -> None:
        self.index, self.size, self.device = towers.index, towers.size, _HOST
        self.towers, self.health, self.name = towers.towers, towers.health, f"{towers.name}/host"
        self._gather = towers.all_gather_bytes

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return self._gather(data)


def on_one_host(channel: Communicator, timeout: float) -> Communicator:
    """Returns the same towers as processes of their host, which share memory. A single tower shares it with no other.

    Raises:
        StartupError: on all towers: they cannot share memory.
    """
    if channel.size == 1 or isinstance(channel, SharedMemoryCommunicator):
        return channel
    host = join(_OnHost(channel), timeout)
    if isinstance(host, str):
        advice = (
            "give every host its own towers with mirrored.MultiWorkerMirroredStrategy(shard_optimizer=True), "
            "which shards the optimizers' state over all of them"
            if host == SEVERAL_HOSTS
            else "use mirrored.MirroredStrategy(shard_optimizer=True)"
        )
        raise StartupError(
            f"CentralStorageStrategy keeps parameters once in the memory of a host, but {host}: {advice}"
        )
    return host


@dataclass(frozen=True)
class _Place:
    """The place of a parameter in the memory of the host.

    Attributes:
        copy, offset: the memory, and the byte at which the parameter starts.
        template: a tensor with its shape, strides and dtype, without memory; its state is in that order.
        shared: the memory, as the inner optimizers update it.
        address: the required address of the parameter itself on a CPU tower; 0 on accelerators.
        table: whether its gradients are sparse.
    """

    copy: SingleCopy
    offset: int
    template: Tensor
    shared: Tensor
    address: int
    table: bool


class CentralStorage(ShardTransport):
    """Keeps one copy of the parameters that optimizers step, in the memory of a host.

    Args:
        channel: the towers, over which the gradients are averaged.
        host: the same towers as processes of their host.
    """

    takes_sparse = True
    state_device = _HOST
    feature, remedy = "CentralStorageStrategy", "train it with MirroredStrategy"

    def __init__(self, channel: Communicator, host: Communicator) -> None:
        super().__init__(channel)
        self._host = host
        self._regions = host.regions if isinstance(host, SharedMemoryCommunicator) else None
        self.state_is_readable = self._regions is not None
        self._chunks: SharedChunks | None = None
        if isinstance(channel, SharedMemoryCommunicator):
            self.reduction = self.lazy = self._chunks = SharedChunks(channel, channel.regions)
        self._places = WeakIdKeyDictionary()  # by parameter
        # The memory of the model's parameters on CPU towers, and the table that is the only parameter in it.
        self._copies: WeakKeyDictionary[SingleCopy, Callable[[], Tensor | None]] = WeakKeyDictionary()
        self._versions = WeakIdKeyDictionary()  # versions of tables, after their last step
        self._steps = 0
        self._frees = False  # whether the next step frees previous memory of parameters and state

    # -- meeting -----------------------------------------------------------------------------------------

    def barrier(self, purpose: str) -> None:
        if self._chunks is not None:
            self._chunks.barrier(purpose)
        elif self._regions is not None:
            self._regions.barrier.wait_tagged(purpose)

    def begin(self, purpose: str, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            place = self._place_of(parameter)
            if place is not None and place.address not in (0, parameter.data_ptr()):
                parameter.data = place.copy.view(place.template, place.offset).copy_(parameter.data)
        self._steps += 1
        copies = enumerate(self._copies.items())
        changed = {i: copy for i, (copy, table) in copies if not self._is_clean(table()) and copy.is_changed()}
        if not changed:
            self.barrier(purpose)
            return
        what = ", ".join(f"{index}: {copy.fingerprint():x}" for index, copy in changed.items())
        self.barrier(f"{purpose}, after it has changed parameters by itself (fingerprints {what})")
        for copy in changed.values() if self.channel.index == 0 else ():
            copy.publish()
        self._host.barrier()
        for copy in changed.values():
            copy.drop_own()

    def _is_clean(self, table: Tensor | None) -> bool:
        """Returns whether a table's pages need not be queried (see [Note: rows of tables])."""
        return table is not None and self._steps % _ASK_AGAIN != 0 and self._versions.get(table) == table._version

    # -- parameters --------------------------------------------------------------------------------------

    def can_place(self, parameter: Tensor) -> bool:
        if parameter.device.type != "cpu" or storage_holders(parameter) == ALONE:
            return True
        place = self._place_of(parameter)
        return place is not None and place.address == parameter.data_ptr()

    def _place_of(self, parameter: Tensor) -> _Place | None:
        place: _Place | None = self._places.get(parameter)
        return place if place is not None and place.template.dtype == parameter.dtype else None

    def place(self, slots: Sequence[Slot], layout: BucketLayout, keys: Keys) -> None:
        pairs = ((slot, slot.parameter()) for slot in slots)
        new = [(slot, p) for slot, p in pairs if p is not None and self._place_of(p) is None]
        dense: list[Slot] = [slot for slot, _ in new if not isinstance(slot, SparseSlot)]
        tables: list[list[Slot]] = [[slot] for slot, _ in new if isinstance(slot, SparseSlot)]
        for together in (dense, *tables) if dense else tables:
            self._place_in_one(together)

    def _place_in_one(self, slots: Sequence[Slot]) -> None:
        """Places parameters in new memory."""
        new = [p for slot in slots if (p := slot.parameter()) is not None]
        offsets = [0]
        for parameter in new:
            offsets.append(offsets[-1] + -(-parameter.nbytes // CHUNK_ALIGNMENT) * CHUNK_ALIGNMENT)
        copy, self._frees = allocate(self._host, offsets[-1]), True
        table, views = isinstance(slots[0], SparseSlot), []
        for parameter, offset in zip(new, offsets, strict=False):
            template = parameter.detach().to("meta")
            shared, view = copy.shared(template, offset), copy.view(template, offset)
            if self.channel.index == 0:
                shared.copy_(parameter)
            address = 0
            if parameter.device.type == "cpu":
                views.append((parameter, view))
                address = view.data_ptr()
                self._copies[copy] = weakref.ref(parameter) if table else lambda: None
            self._places[parameter] = _Place(copy, offset, template, shared, address, table)
        self._host.barrier()
        for parameter, view in views:
            parameter.data = view

    def home(self, shard: Shard) -> Tensor:
        place = None if shard.whole else self._place_of(shard.parameter)
        return super().home(shard) if place is None else shard.of(place.shared)

    # -- one step ----------------------------------------------------------------------------------------

    def load(self, shards: Sequence[Shard], parameters: Sequence[nn.Parameter]) -> None:
        arriving = []
        for shard, parameter in zip(shards, parameters, strict=True):
            if shard.whole:
                super().load([shard], [parameter])
                continue
            gradient = shard.gradient()
            if shard.parameter.device.type == "cpu":
                parameter.grad = gradient
                if isinstance(shard, RowShard) and gradient is not None:  # see [Note: rows of tables]
                    _copy_rows(shard.of(shard.parameter), parameter, gradient)
                continue
            parameter.grad = None
            if gradient is not None and gradient.is_sparse:
                parameter.grad, gradient = gradient.cpu(), None
            arriving.append(
                (parameter, HostCopy(shard.of(shard.parameter)), None if gradient is None else HostCopy(gradient))
            )
        for parameter, value, copied in arriving:
            parameter.copy_(value.get())  # see [Note: devices hold the current values]
            parameter.grad = parameter.grad if copied is None else copied.get()

    def plan(self, shards: Sequence[Sequence[Shard]]) -> Callable[[], None]:
        slots = list(dict.fromkeys(shard.slot for row in shards for shard in row))

        def spread() -> None:
            """Waits until all parameters are complete, and copies their new values to accelerators."""
            self._host.barrier()
            if self._frees:
                give_back_freed_memory()
                self._frees = False
            for slot in slots:
                if (parameter := slot.parameter()) is None or (place := self._place_of(parameter)) is None:
                    continue
                if not place.address:
                    parameter.copy_(on_device(place.shared, parameter.device))
                    continue
                if place.table and (gradient := slot.gradient) is not None:
                    _copy_rows(place.shared, parameter.detach(), gradient)
                torch.autograd.graph.increment_version(parameter)
                if place.table:
                    self._versions[parameter] = parameter._version

        return spread

    # -- state -------------------------------------------------------------------------------------------

    def readable_state(self, key: int) -> ReadableState | None:
        return None if self._regions is None else ReadableState(self._regions, key)

    def release(self, key: int) -> None:
        super().release(key)
        if self._regions is not None and self._host is not self.channel:
            self._regions.release(key)


def _copy_rows(source: Tensor, target: Tensor, gradient: Tensor) -> None:
    """Copies the rows that a gradient has from one table to another, unless they are the same."""
    if not gradient.is_sparse:
        if not torch.equal(source, target):
            target.copy_(source)
        return
    rows = gradient.coalesce().indices()[0]
    values = source.index_select(0, rows)
    if not torch.equal(values, target.index_select(0, rows)):
        target.index_copy_(0, rows, values)
