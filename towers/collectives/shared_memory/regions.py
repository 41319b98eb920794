"""Shared regions: memory that a tower computes in and the other towers of its host map, such as gradient buckets.

Averaging any number of regions takes two barriers and no staging area::

    barrier                     all towers have filled their regions
    average the own chunk       tower i reduces the i-th chunk of all towers' regions, always from tower 0 to the last,
                                and writes the result into all of them, in pieces that fit the cache
    barrier                     all chunks are done
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from towers.collectives.arithmetic import add_by_tree, chunk_of, reduce_into
from towers.collectives.shared_memory.barrier import Barrier
from towers.collectives.shared_memory.segment import Segment
from towers.system.messages import get_logger
from towers.system.timeouts import Deadline, clock

log = get_logger("towers")

KEYS = 4096
"""Regions have keys below this. There is no shared memory for higher keys."""

_REFUSED = -1  # instead of a size: the memory could not be allocated; 0: there is no region

_ENTRY = 3  # integers of a region's entry: its version, its file, its size in bytes
TABLE_BYTES = 8 * _ENTRY * KEYS
"""Size of the table in which a tower publishes its regions."""

_ENDING = 30.0  # seconds
_PIECE = 2**18  # bytes of a region that are reduced at a time: as many as two towers' fit into a core's cache
_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")


class _Region:
    """The memory of all towers under a key.

    Attributes:
        key: distinguishes it from other regions.
        segment, address: this tower's own memory; the address is 0 if there is none.
        numel, dtype: the size and dtype of the allocation.
        blocks: every tower's memory, as bytes. None: there is none. Empty: it could not be allocated.
        versions: the versions of the blocks that are mapped here.
        tensors: every tower's memory in the shape of this tower's allocation; None if some tower has less.
        pieces: the chunk that this tower reduces, of every tower, piece by piece.
    """

    def __init__(self, key: int, towers: int) -> None:
        self.key = key
        self.segment: Segment | None = None
        self.address = self.numel = 0
        self.dtype = torch.uint8
        self.blocks: list[Tensor | None] = [None] * towers
        self.versions = [0] * towers
        self.tensors: list[Tensor] | None = None
        self.pieces: list[list[Tensor]] = []


class Regions:
    """One tower's shared regions, and its mappings of the others'.

    Attributes:
        barrier: the barrier of all towers.
        newly_mapped: whether some tower's memory was newly mapped since :meth:`close_files`; the same on all towers.
            Its owner must not end before all have mapped it.

    Args:
        index: this tower.
        tables: every tower's table, :data:`TABLE_BYTES` long, as 64-bit integers.
        processes: every tower's process id.
    """

    def __init__(self, index: int, barrier: Barrier, tables: Sequence[memoryview], processes: Sequence[int]) -> None:
        self.barrier = barrier
        self._index, self._size = index, len(processes)
        self._tables = list(tables)
        self._processes = list(processes)
        self._regions: dict[int, _Region] = {}
        self._mapped: list[_Region] = []
        self._warned = False
        self.newly_mapped = False

    def allocate(self, key: int, numel: int, dtype: torch.dtype) -> Tensor | None:
        """Returns this tower's memory under ``key``, zeros, or None if it cannot be allocated; the others see that.

        The others map the newest allocation. It exists as long as a tensor of it does on any tower.
        """
        nbytes = numel * dtype.itemsize
        if key >= KEYS:
            self._warn_once(nbytes, f"all {KEYS} places for shared regions are used")
            return None
        region = self._region(key)
        entry = self._tables[self._index][_ENTRY * key : _ENTRY * (key + 1)]
        entry[0], entry[2] = entry[0] + 1, _REFUSED
        region.segment, region.address, region.blocks[self._index] = None, 0, _NOTHING
        try:
            segment = Segment.create(nbytes, reserve=True)
        except OSError as error:
            self._warn_once(nbytes, str(error))
            return None
        entry[1], entry[2] = segment.file, segment.nbytes
        region.segment, region.numel, region.dtype = segment, numel, dtype
        region.blocks[self._index] = segment.tensor(torch.uint8, segment.nbytes)
        tensor = segment.tensor(dtype, numel)  # not the block's tensor: callers count the views of theirs
        region.address = tensor.data_ptr()
        return tensor

    def _region(self, key: int) -> _Region:
        if (region := self._regions.get(key)) is None:
            region = self._regions[key] = _Region(key, self._size)
        return region

    def _warn_once(self, nbytes: int, why: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning(
                "a shared region of %.3g MB cannot be allocated (%s): its contents go a slower way, and the "
                "state_dict() of a sharded optimizer may need all towers to call it",
                nbytes / 1e6,
                why,
            )

    def piece(self, key: int, start: int, numel: int) -> Tensor | None:
        """Returns a piece of this tower's memory under ``key`` as a tensor with its own storage, or None."""
        region = self._regions.get(key)
        if region is None or region.segment is None:
            return None
        return region.segment.tensor(region.dtype, numel, start * region.dtype.itemsize)

    def release(self, key: int) -> None:
        """Forgets the allocation under ``key``."""
        if self._regions.pop(key, None) is not None:
            self._tables[self._index][_ENTRY * key + 2] = 0

    def average(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Averages in place every tensor that is a shared region on all towers.

        Returns:
            The other tensors, unchanged, for the slower way.
        """
        return self._reduce(tensors, partial(reduce_into, op="sum", scale=1.0 / self._size))

    def sum_by_tree(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sums tensors like :meth:`average`, in the order of :func:`add_by_tree`."""
        return self._reduce(tensors, add_by_tree)

    def _reduce(self, tensors: Sequence[Tensor], reduce: Callable[[Tensor, Sequence[Tensor]], None]) -> list[Tensor]:
        at = {region.address: region for region in self._regions.values()}
        self.barrier.wait()
        others = []
        for tensor in tensors:
            region = at.get(tensor.data_ptr())
            if region is None or self._map(region, by_all=False).tensors is None:
                others.append(tensor)
                continue
            for pieces in region.pieces:
                total, *copies = pieces
                reduce(total, pieces)
                for copy in copies:
                    copy.copy_(total)
        self.barrier.wait()
        self.close_files()
        return others

    def map_peers(self, key: int) -> list[Tensor] | None:
        """Returns every tower's memory under ``key``, or None on all towers if some tower has none.

        All towers call it after a barrier, and :meth:`close_files` after the next one.
        """
        return self._map(self._region(key)).tensors if key < KEYS else None

    def tensors_at(self, tensor: Tensor) -> list[Tensor] | None:
        """Returns every tower's memory of the shared region at ``tensor``'s address; see :meth:`map_peers`."""
        region = next((r for r in self._regions.values() if r.address == tensor.data_ptr()), None)
        return None if region is None else self._map(region, by_all=False).tensors

    def map_blocks(self, key: int) -> list[Tensor | None]:
        """Returns every tower's memory under ``key``, as bytes, of any size. All towers call it like :meth:`map_peers`.

        A block is None if its tower has allocated none, and empty if its tower could not allocate it.
        """
        return list(self._map(self._region(key)).blocks) if key < KEYS else [_NOTHING] * self._size

    def average_range(self, tensors: Sequence[Tensor], start: int, end: int) -> None:
        """Averages a range of all towers' ``tensors``, in this tower's; the bits are those of :meth:`average`."""
        step = _PIECE // tensors[self._index].element_size()
        for at in range(start, end, step):
            pieces = [tensor[at : min(at + step, end)] for tensor in tensors]
            reduce_into(pieces[self._index], pieces, "sum", scale=1.0 / self._size)

    def close_files(self) -> None:
        """Closes, after a barrier, the files of all regions that all towers have mapped before it."""
        for region in self._mapped:
            if region.segment is not None:
                region.segment.close_file()
        self._mapped = []
        self.newly_mapped = False

    def _map(self, region: _Region, *, by_all: bool = True) -> _Region:
        """Maps every tower's memory that is new, and returns the region.

        Args:
            by_all: whether all towers do it now. Otherwise, only towers with their own memory there do it, so this
                tower's file stays open until all have.
        """
        changed = False
        for tower, table in enumerate(self._tables):
            version, file, nbytes = table[_ENTRY * region.key : _ENTRY * (region.key + 1)]
            if version == region.versions[tower]:
                continue
            region.versions[tower], changed = version, True
            if tower == self._index:
                continue
            if nbytes > 0:
                region.blocks[tower] = self._open(tower, file).tensor(torch.uint8, nbytes)
            else:
                region.blocks[tower] = _NOTHING if nbytes == _REFUSED else None
        if changed:
            self.newly_mapped = True
            self._cut(region)
        if region.segment is not None and region.segment.file >= 0 and (by_all or region.tensors is not None):
            self._mapped.append(region)
        return region

    def _cut(self, region: _Region) -> None:
        """Splits all towers' memory in the way of this tower's allocation."""
        itemsize = region.dtype.itemsize
        nbytes = region.numel * itemsize
        enough = [block for block in region.blocks if block is not None and block.nbytes >= nbytes > 0]
        region.tensors, region.pieces = None, []
        if len(enough) == self._size:
            region.tensors = [block[:nbytes].view(region.dtype) for block in enough]
            start, end = chunk_of(region.numel, itemsize, self._size, self._index)
            columns = [tensor[start:end].split(_PIECE // itemsize) for tensor in region.tensors if start < end]
            region.pieces = [list(pieces) for pieces in zip(*columns, strict=True)]

    def _open(self, tower: int, file: int) -> Segment:
        try:
            return Segment.open(self._processes[tower], file)
        except OSError as error:
            # A process that is being killed closes its files before it has ended, on a busy host seconds before.
            deadline = Deadline(_ENDING if isinstance(error, FileNotFoundError) else 0.0)
            while (lost := self.barrier.lost_peer()) is None and not deadline.has_passed():
                clock.sleep(0.05)
            raise lost or error from None

    def close(self) -> None:
        """Closes the files of all regions. No further tower can map them."""
        for region in self._regions.values():
            if region.segment is not None:
                region.segment.close_file()
