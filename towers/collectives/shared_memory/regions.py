"""Shared regions: memory that a tower computes in and that the other towers of its host map, such as gradient buckets.

Averaging a region takes two barriers and no staging area::

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
from towers.system.log import get_logger
from towers.system.timeouts import clock

log = get_logger("towers")

KEYS = 4096
"""Regions have keys below this; there is no shared memory for higher ones."""

_REFUSED = -1  # in place of a size: the memory could not be allocated; 0: there is no region

_ENTRY = 3  # integers of a region's entry: its version, its file, its size in bytes
TABLE_BYTES = 8 * _ENTRY * KEYS
"""Size of the table in which a tower publishes its regions."""

_PIECE = 2**18  # bytes of a region that are reduced at a time: as many as two towers' fit into a core's cache


class _Region:
    """The memory of all towers under one key.

    Attributes:
        segment: this tower's own memory.
        tensors: every tower's memory, as far as it is mapped here, and which ``versions`` of it that is.
        pieces: the chunk that this tower reduces, of every tower, piece by piece.
    """

    def __init__(self, key: int, numel: int, dtype: torch.dtype, towers: int) -> None:
        self.key, self.numel, self.dtype = key, numel, dtype
        self.segment: Segment | None = None
        self.tensors: list[Tensor] = [torch.empty(0, device="cpu")] * towers
        self.versions = [0] * towers
        self.pieces: list[list[Tensor]] = []


class Regions:
    """One tower's shared regions, and its mappings of the others'.

    Attributes:
        barrier: the barrier of all towers.
        newly_mapped: some tower's memory was mapped anew since :meth:`close_files`; the same on all towers. Its owner
            must not end before all have mapped it.

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
        self._blocks: dict[tuple[int, int], tuple[int, Tensor | None]] = {}
        self._said = False
        self.newly_mapped = False

    def allocate(self, key: int, numel: int, dtype: torch.dtype) -> Tensor | None:
        """This tower's memory under ``key``, zeros; None when it cannot be allocated, which the others will see.

        The others map what was allocated last. It lives as long as a tensor of it does on any tower.
        """
        if key >= KEYS:
            self._say_once(numel * dtype.itemsize, f"all {KEYS} places for shared regions are used")
            return None
        region = self._regions.get(key)
        if region is None:
            region = self._regions[key] = _Region(key, numel, dtype, self._size)
        entry = self._tables[self._index][_ENTRY * key : _ENTRY * (key + 1)]
        try:
            segment = Segment.create(numel * dtype.itemsize, reserve=True)
        except OSError as error:
            entry[0], entry[2] = entry[0] + 1, _REFUSED
            self._say_once(numel * dtype.itemsize, str(error))
            return None
        entry[0], entry[1], entry[2] = entry[0] + 1, segment.file, segment.nbytes
        region.segment, region.tensors[self._index] = segment, segment.tensor(dtype, numel)
        return segment.tensor(dtype, numel)  # another tensor: callers count the views of theirs

    def _say_once(self, nbytes: int, why: str) -> None:
        if not self._said:
            self._said = True
            log.warning(
                "a shared region of %.3g MB cannot be allocated (%s): its contents go a slower way, and the "
                "state_dict() of a sharded optimizer may need all towers to call it",
                nbytes / 1e6,
                why,
            )

    def piece(self, key: int, start: int, numel: int) -> Tensor | None:
        """A part of this tower's memory under ``key``, as a tensor with a storage of its own, if there is any."""
        region = self._regions.get(key)
        if region is None or region.segment is None or self._tables[self._index][_ENTRY * key + 2] <= 0:
            return None
        return region.segment.tensor(region.dtype, numel, start * region.dtype.itemsize)

    def release(self, key: int) -> None:
        """Forget what was allocated under ``key``."""
        for tower in range(self._size):
            self._blocks.pop((key, tower), None)
        if self._regions.pop(key, None) is not None:
            self._tables[self._index][_ENTRY * key + 2] = 0

    def average(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Average tensors that are regions, in place; returns those that are none on some tower."""
        return self._reduce(tensors, partial(reduce_into, op="sum", scale=1.0 / self._size))

    def sum_by_tree(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """As :meth:`average`, but the sum, in the order of :func:`add_by_tree`."""
        return self._reduce(tensors, add_by_tree)

    def _reduce(self, tensors: Sequence[Tensor], reduce: Callable[[Tensor, Sequence[Tensor]], None]) -> list[Tensor]:
        at = {region.tensors[self._index].data_ptr(): region for region in self._regions.values()}
        regions = [at.get(tensor.data_ptr()) for tensor in tensors]
        self.barrier.wait()
        within = [region if region is not None and self._map_together(region) else None for region in regions]
        for region in within:
            if region is not None:
                for pieces in region.pieces:
                    first, *others = pieces
                    reduce(first, pieces)
                    for other in others:
                        other.copy_(first)
        self.barrier.wait()
        self.close_files()
        return [tensor for tensor, region in zip(tensors, within, strict=True) if region is None]

    def map_peers(self, key: int) -> list[Tensor] | None:
        """Every tower's memory under ``key``; None, on all towers, when some tower has none.

        All towers call it after a barrier, and :meth:`close_files` after the next one.
        """
        region = self._regions.get(key)
        return region.tensors if region is not None and self._map_together(region) else None

    def blocks(self, key: int) -> list[Tensor | None]:
        """What every tower has allocated under ``key``, as bytes, of any size; None where that is nothing.

        As :meth:`map_peers`, for keys that are not used with it. Empty where the memory could not be allocated.
        """
        found: list[Tensor | None] = []
        if key >= KEYS:
            return [torch.empty(0, dtype=torch.uint8, device="cpu")] * self._size
        for tower, table in enumerate(self._tables):
            version, file, nbytes = table[_ENTRY * key : _ENTRY * (key + 1)]
            known, block = self._blocks.get((key, tower), (0, None))
            if version != known:
                self.newly_mapped = True
                if nbytes == 0:  # its owner has released it
                    block = None
                elif nbytes == _REFUSED:
                    block = torch.empty(0, dtype=torch.uint8, device="cpu")
                elif tower == self._index:
                    region = self._regions[key]
                    block = region.tensors[tower]
                    self._mapped.append(region)
                else:
                    block = self._open(tower, file).tensor(torch.uint8, nbytes)
                self._blocks[key, tower] = version, block
            found.append(block)
        return found

    def average_range(self, tensors: Sequence[Tensor], start: int, end: int) -> None:
        """Average a range of all towers' ``tensors``, in this tower's; the bits are those of :meth:`average`."""
        step = _PIECE // tensors[self._index].element_size()
        for at in range(start, end, step):
            parts = [tensor[at : min(at + step, end)] for tensor in tensors]
            reduce_into(parts[self._index], parts, "sum", scale=1.0 / self._size)

    def close_files(self) -> None:
        """After a barrier: close the files of what all towers have mapped before it."""
        for region in self._mapped:
            if region.segment is not None:
                region.segment.close_file()
        self._mapped = []
        self.newly_mapped = False

    def _map_together(self, region: _Region) -> bool:
        reached = self._map(region)
        if reached and region.segment is not None and region.segment.file >= 0:
            self._mapped.append(region)
        return reached

    def _map(self, region: _Region) -> bool:
        """Map the other towers' regions where they are new. False, on all towers, when some tower has none."""
        changed = False
        for tower, table in enumerate(self._tables):
            version, file, nbytes = table[_ENTRY * region.key : _ENTRY * (region.key + 1)]
            if nbytes < region.numel * region.dtype.itemsize:
                return False
            if version == region.versions[tower]:
                continue
            if tower != self._index:
                region.tensors[tower] = self._open(tower, file).tensor(region.dtype, region.numel)
            region.versions[tower] = version
            changed = True
        if changed:
            self.newly_mapped = True
            start, end = chunk_of(region.numel, region.dtype.itemsize, self._size, self._index)
            step = _PIECE // region.dtype.itemsize
            columns = [tensor[start:end].split(step) for tensor in region.tensors] if start < end else []
            region.pieces = [list(piece) for piece in zip(*columns, strict=True)]
        return True

    def _open(self, tower: int, file: int) -> Segment:
        try:
            return Segment.open(self._processes[tower], file)
        except OSError as error:
            for _ in range(20):  # a process that is being killed closes its files a moment before it has ended
                if (lost := self.barrier.lost_peer()) is not None:
                    raise lost from None
                clock.sleep(0.05)
            raise error from None

    def close(self) -> None:
        """Close the files of all regions: no tower maps them any more."""
        for region in self._regions.values():
            if region.segment is not None:
                region.segment.close_file()
