"""Central storage: one copy of parameters and their optimizers' state in the memory of a host, for all its towers.

Each tower updates its shards of the parameters in place, as with ``shard_optimizer=True``, and need not write them to
the others. On CPU towers, the model's parameters are that memory ([Note: one copy, and what a script writes]). On
accelerators, a step consists of the following, and no optimizer state is on them::

    backward                gradients are averaged as usual
    barrier                 all towers have reached the step
    load                    each tower copies its shards of parameters and gradients to the host
    inner.step()            updates the shards there
    barrier                 all parameters are complete
    spread                  each tower copies all parameters to its device

[Note: one copy, and what a script writes] Parameters that several towers share must not be written to by all of them: a
script's ``p.data.mul_(0.9)`` would count once for each tower. So a tower maps the memory twice. Inner optimizers update
the shared mapping. The model's parameters are in a mapping of copy-on-write pages. Those show the updates, and a page
that the script writes to becomes this tower's own. All towers write the same (rule R1), so at the next step one tower's
pages become the shared ones, and all towers drop theirs. A script sees no difference. The kernel reports which pages
are a tower's own. Querying it takes some 6 µs per MB, and 15 before Linux 6.7. Pages with the same content as the
shared ones are not a change: a single tower may evaluate other weights and then restore these.

[Note: devices hold the current values] The shards are copied to the host in every step, even if they are still there
from the last one, because a script may have changed the device's. They are one N-th of the data that is copied back.

[Note: rows of tables] Querying the kernel for the pages of a large table takes longer than updating the few rows that a
step has used. So a table's pages are queried when its version shows that it was written to, and in every 64th step, to
save memory. Values that a script has written only through ``table.data`` count without that: each tower takes the
values of its rows from the model's table before it updates them, and writes them back if the table has its own pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import struct
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fcntl import ioctl
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from towers.collectives.arithmetic import CHUNK_ALIGNMENT
from towers.collectives.communicator import Communicator, PeerGroup
from towers.collectives.shared_memory.communicator import SEVERAL_HOSTS, SharedMemoryCommunicator, join
from towers.collectives.shared_memory.segment import Segment
from towers.errors import MirrorError, StartupError
from towers.gradients.buckets import BucketLayout, Keys, Slot, SparseSlot
from towers.gradients.reductions import SharedChunks
from towers.mirroring import fingerprints
from towers.sharding.shards import RowShard, Shard
from towers.sharding.state import ReadableState
from towers.sharding.transport import ShardTransport
from towers.system.tensors import ALONE, HostCopy, on_device, view_like
from towers.system.torch_private import storage_holders

_HOST = torch.device("cpu")
_ASK_AGAIN = 64  # steps

_IN_MEMORY, _OF_FILE = 0b110, 0b001  # of the three highest bits of a page's entry: present, swapped out; not private

# PAGEMAP_SCAN and its argument, struct pm_scan_arg (Linux, Documentation/admin-guide/mm/pagemap.rst).
_SCAN, _SCAN_ARGUMENT = 0xC0606610, struct.Struct("12Q")
_IS_FILE, _IS_PRESENT_OR_SWAPPED = 0b100, 0b11000


class SingleCopy:
    """One tower's mappings of the memory, which keep no file open.

    Args:
        path: of an open file.
        nbytes: its size.

    Raises:
        RuntimeError: it cannot be mapped.
    """

    def __init__(self, path: str, nbytes: int) -> None:
        self._shared = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)
        self._view = torch.from_file(path, shared=False, size=nbytes, dtype=torch.uint8)

    def shared(self, like: Tensor, offset: int) -> Tensor:
        """Returns the memory from byte ``offset`` on, in the shape, strides and dtype of ``like``.

        All towers see updates.
        """
        return _tensor(self._shared, like, offset)

    def view(self, like: Tensor, offset: int) -> Tensor:
        """Returns the same for reading, with its own storage. Data that this tower writes there become its own."""
        return _tensor(self._view, like, offset)

    def is_changed(self) -> bool:
        """Returns whether this tower has written other values than the shared ones."""
        if not self._has_own_pages():
            return False
        changed = not torch.equal(self._view.view(torch.int64), self._shared.view(torch.int64))
        if not changed:
            self.drop_own()
        return changed

    def fingerprint(self) -> int:
        """Returns a fingerprint of the memory, as this tower sees it."""
        return int(fingerprints([self._view]))

    def _has_own_pages(self) -> bool:
        """Returns whether the kernel reports own pages, or reports nothing."""
        start, nbytes = self._view.data_ptr(), self._view.nbytes
        with contextlib.suppress(OSError), open("/proc/self/pagemap", "rb", buffering=0) as pages:
            region = (ctypes.c_uint64 * 3)()
            first_page = (start, start + nbytes, 0, ctypes.addressof(region), 1, 1)
            not_of_file = (_IS_FILE, _IS_FILE, _IS_PRESENT_OR_SWAPPED, _IS_PRESENT_OR_SWAPPED)
            with contextlib.suppress(OSError):  # raised by older kernels
                question = _SCAN_ARGUMENT.pack(_SCAN_ARGUMENT.size, 0, *first_page, *not_of_file)
                return bool(ioctl(pages, _SCAN, bytearray(question)))
            count = nbytes // mmap.PAGESIZE
            entries = np.frombuffer(os.pread(pages.fileno(), 8 * count, 8 * (start // mmap.PAGESIZE)), np.uint64)
            bits = entries >> np.uint64(61)
            return bool(((bits & _IN_MEMORY != 0) & (bits & _OF_FILE == 0)).any())
        return True

    def publish(self) -> None:
        """Makes this tower's own pages the shared ones."""
        self._shared.copy_(self._view)

    def drop_own(self) -> None:
        """Drops this tower's own pages, so that it sees the shared ones again."""
        memory = ctypes.c_void_p(self._view.data_ptr()), ctypes.c_size_t(self._view.nbytes)
        if ctypes.CDLL(None).madvise(*memory, mmap.MADV_DONTNEED) != 0:  # the memory is locked (mlockall)
            self._view.copy_(self._shared)


def _tensor(memory: Tensor, like: Tensor, offset: int) -> Tensor:
    dtype = like.dtype.to_real() if like.is_complex() else like.dtype
    flat = torch.frombuffer(memory.numpy(), dtype=dtype, count=like.nbytes // dtype.itemsize, offset=offset)
    return view_like(like, flat)


def give_back_freed_memory() -> None:
    """Returns memory to the kernel that this process has freed, and kept (:func:`machine.keep_freed_memory`)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def allocate(host: Communicator, nbytes: int) -> SingleCopy:
    """Allocates zeros, once for all towers, which are processes of one host. All of them call it.

    Raises:
        MirrorError: on all towers: the memory is not available.
    """
    segment, path, copy, problem = None, "", None, ""
    if host.index == 0:
        try:
            segment = Segment.create(nbytes, reserve=True)
            path = f"/proc/{os.getpid()}/fd/{segment.file}"
        except OSError as error:
            problem = str(error)
    path = host.all_gather_bytes(path.encode())[0].decode()
    if path:
        try:
            copy = SingleCopy(path, os.stat(path).st_size)
        except (OSError, RuntimeError) as error:
            problem = str(error)
    problems = [reply.decode() for reply in host.all_gather_bytes(problem.encode())]  # all have tried to map it
    if segment is not None:
        segment.close_file()
    if copy is None or any(problems):
        raise MirrorError(
            f"{nbytes / 1e6:.3g} MB of parameters cannot be allocated in the host's memory: "
            f"{next(filter(None, problems))}. Give the job more memory (in a container: more of its limit)"
        )
    return copy


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
        stepped: dict[SingleCopy, None] = {}  # others may be garbage, which exists on some towers only
        for parameter in parameters:
            place = self._place_of(parameter)
            if place is None:
                continue
            stepped[place.copy] = None
            if place.address not in (0, parameter.data_ptr()):
                parameter.data = place.copy.view(place.template, place.offset).copy_(parameter.data)
        self._steps += 1
        copies = [(copy, self._copies[copy]) for copy in stepped if copy in self._copies]
        changed = {
            i: copy for i, (copy, table) in enumerate(copies) if not self._is_clean(table()) and copy.is_changed()
        }
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
