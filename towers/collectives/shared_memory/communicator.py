"""Collectives of the towers of one host, through shared memory, without sockets.

Every tower has a segment. It contains an inbox of semaphores (one for each other tower,
:mod:`towers.collectives.shared_memory.barrier`), a table of its shared regions for in-place averages
(:mod:`towers.collectives.shared_memory.regions`), and a staging area for all other collectives. Staging is
double-buffered, so that no barrier is needed before a half is written again: its tower has passed a barrier since it
last wrote the half, so all others have read it. So a piece takes one barrier. It takes two if each tower reduces a
chunk for all others (:meth:`SharedMemoryCommunicator.all_reduce` of more than 32 KiB).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from towers.collectives.arithmetic import check_reducible, chunk_of, reduce_into
from towers.collectives.communicator import (
    Communicator,
    Deferred,
    PeerGroup,
    Pending,
    as_bytes,
    in_step,
    keep_from_forks,
)
from towers.collectives.shared_memory import semaphores
from towers.collectives.shared_memory.barrier import STATUS_BYTES, Barrier
from towers.collectives.shared_memory.regions import TABLE_BYTES, Regions
from towers.collectives.shared_memory.segment import ALIGNMENT, Segment, aligned, map_segments
from towers.errors import DisagreementError
from towers.system import machine
from towers.system.tensors import contiguous, copy_back

SEVERAL_HOSTS = "the towers run on several hosts"

_HALF = 2**20  # bytes of one half of a staging area
_ALONE = 2**15  # bytes up to which every tower reduces everything itself, which saves a barrier


class _Layout:
    """The offsets in a tower's segment, in bytes."""

    def __init__(self, towers: int) -> None:
        self.inbox = 0
        self.status = aligned(semaphores.BYTES * towers)
        self.table = self.status + aligned(STATUS_BYTES)
        self.staging = aligned(self.table + TABLE_BYTES)
        self.total = self.staging + 2 * _HALF


class SharedMemoryCommunicator(Communicator):
    """Collectives of towers that are processes of one host. :func:`join` creates it."""

    may_overlap = False

    def __init__(self, base: PeerGroup, timeout: float, segments: Sequence[Segment], processes: Sequence[int]) -> None:
        self.index, self.size, self.device = base.index, base.size, base.device
        self.towers, self.health = base.towers, base.health
        self.backend = "shared memory"
        self._timeout = timeout
        self._segments = list(segments)
        self._layout = layout = _Layout(self.size)
        inboxes = [segment.address + layout.inbox for segment in segments]
        slots = [segment.memory(STATUS_BYTES, layout.status) for segment in segments]
        self.name = base.next_name()
        self._barrier = Barrier(self.index, inboxes, slots, processes, timeout, self.towers, self.health, self.name)
        keep_from_forks(self._barrier)
        tables = [segment.memory(TABLE_BYTES, layout.table).cast("q") for segment in segments]
        self.regions = Regions(self.index, self._barrier, tables, processes)
        self._half = 0
        self._staging: dict[tuple[torch.dtype, int], tuple[list[Tensor], list[Tensor]]] = {}
        self._queue: list[Tensor] = []

    # -- shared regions ----------------------------------------------------------------------------------

    def allocate(self, key: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if numel and device.type == "cpu":
            region = self.regions.allocate(key, numel, dtype)
            if region is not None:
                return region
        return super().allocate(key, numel, dtype, device)

    def release(self, key: int) -> None:
        self.regions.release(key)

    def submit_average(self, tensor: Tensor) -> Pending:
        self._queue.append(tensor)
        return Deferred(self.finish_submitted)

    @in_step
    def finish_submitted(self) -> None:
        """Averages all submitted tensors. Towers reduce on the cores that they compute on, so nothing could overlap."""
        queue, self._queue = self._queue, []
        if queue:
            for tensor in self.regions.average(queue):
                self.all_reduce(tensor.mul_(1.0 / self.size))

    @in_step
    def sum_by_tree(self, tensors: Sequence[Tensor]) -> None:
        super().sum_by_tree(self.regions.sum_by_tree(tensors))

    # -- staging -----------------------------------------------------------------------------------------

    def _slots(self, dtype: torch.dtype, numel: int) -> list[Tensor]:
        """Returns the next half of every tower's staging area, as tensors."""
        halves = self._staging.get((dtype, numel))
        if halves is None:
            if len(self._staging) > 64:
                self._staging.clear()
            at = self._layout.staging
            first, second = (
                [segment.tensor(dtype, numel, at + half * _HALF) for segment in self._segments] for half in (0, 1)
            )
            halves = self._staging[dtype, numel] = first, second
        self._half ^= 1
        return halves[self._half]

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        if tensor.numel() == 0:
            return
        check_reducible(op, tensor.dtype)
        dense = contiguous(tensor)
        self._all_reduce_flat(dense.view(-1), op)
        copy_back(dense, tensor)

    @in_step
    def _all_reduce_flat(self, flat: Tensor, op: str) -> None:
        if flat.nbytes <= _ALONE:
            slots = self._slots(flat.dtype, flat.numel())
            slots[self.index].copy_(flat)
            self._barrier.wait()
            reduce_into(flat, slots, op)
            return
        for piece in flat.split(_HALF // flat.element_size()):
            slots = self._slots(flat.dtype, piece.numel())
            slots[self.index].copy_(piece)
            self._barrier.wait()
            bounds = [chunk_of(piece.numel(), flat.element_size(), self.size, tower) for tower in range(self.size)]
            start, end = bounds[self.index]
            chunks = [slot[start:end] for slot in slots]
            total = torch.empty_like(chunks[0])
            reduce_into(total, chunks, op)
            chunks[self.index].copy_(total)  # no other tower touches this chunk of any half
            self._barrier.wait()
            for slot, (start, end) in zip(slots, bounds, strict=True):
                piece[start:end].copy_(slot[start:end])

    def all_gather(self, tensor: Tensor) -> Tensor:
        gathered = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device="cpu")
        self.all_gather_into(gathered.unbind(0), tensor)
        return gathered

    @in_step
    def all_gather_into(self, gathered: Sequence[Tensor], tensor: Tensor) -> None:
        """Fills ``gathered`` with all towers' tensors, in tower order; contiguous, each as large as ``tensor``."""
        local = as_bytes(tensor)
        rows = [as_bytes(row) for row in gathered]
        for start in range(0, local.numel(), _HALF):
            piece = local[start : start + _HALF]
            slots = self._slots(torch.uint8, piece.numel())
            slots[self.index].copy_(piece)
            self._barrier.wait()
            for row, slot in zip(rows, slots, strict=True):
                row[start : start + _HALF].copy_(slot)

    @in_step
    def reduce_scatter(self, rows: Tensor, op: str = "sum") -> Tensor:
        """Reduces one row for each tower over all towers, and returns this tower's row.

        Args:
            rows: shape ``(size, *row)``, of one shape and dtype on all towers.
        """
        check_reducible(op, rows.dtype)
        result = torch.empty(rows.shape[1:], dtype=rows.dtype, device="cpu")
        if result.numel() == 0:
            return result
        local = rows.detach().reshape(self.size, -1)
        at = 0
        room = max(1, _HALF // (self.size * rows.element_size()))
        for piece in result.view(-1).split(room):
            slots = self._slots(rows.dtype, self.size * piece.numel())
            slots[self.index].view(self.size, -1).copy_(local[:, at : at + piece.numel()])
            self._barrier.wait()
            reduce_into(piece, [slot.view(self.size, -1)[self.index] for slot in slots], op)
            at += piece.numel()
        return result

    @in_step
    def all_to_all(self, rows: Tensor) -> Tensor:
        received = torch.empty_like(rows, memory_format=torch.contiguous_format)
        self._exchange([as_bytes(row) for row in rows], [as_bytes(row) for row in received], received[0].nbytes)
        return received

    @in_step
    def exchange(self, sent: Sequence[Tensor], received: Sequence[Tensor]) -> None:
        """Sends ``sent[i]`` to tower i, and fills ``received[i]`` with the data that tower i sends to this one.

        Args:
            sent, received: flat tensors of bytes, one for each tower; any lengths.

        Raises:
            DisagreementError: on all towers, if a tower sends more or less than the other receives.
        """
        local = [[tensor.numel() for tensor in tensors] for tensors in (sent, received)]
        lengths = self.all_gather(torch.tensor(local, device="cpu"))
        wrong = (lengths[:, 0] != lengths[:, 1].T).nonzero()
        if wrong.numel():
            one, other = (int(tower) for tower in wrong[0])
            raise DisagreementError(
                f"tower {one} gives {lengths[one, 0, other]} bytes to tower {other}, which takes "
                f"{lengths[other, 1, one]}"
            )
        self._exchange(sent, received, int(lengths[:, 0].fill_diagonal_(0).max()))

    def _exchange(self, sent: Sequence[Tensor], received: Sequence[Tensor], longest: int) -> None:
        """Performs :meth:`exchange` if no tower sends more than ``longest`` bytes to another."""
        received[self.index].copy_(sent[self.index])
        room = _HALF // self.size // ALIGNMENT * ALIGNMENT
        others = [tower for tower in range(self.size) if tower != self.index]
        for start in range(0, longest, room):
            slots = self._slots(torch.uint8, self.size * room)
            for tower in others:
                piece = sent[tower][start : start + room]
                slots[self.index][tower * room : tower * room + piece.numel()].copy_(piece)
            self._barrier.wait()
            for tower in others:
                piece = received[tower][start : start + room]
                piece.copy_(slots[tower][self.index * room : self.index * room + piece.numel()])

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        dense = contiguous(tensor)
        self._broadcast_bytes(as_bytes(dense), source)
        copy_back(dense, tensor)

    @in_step
    def _broadcast_bytes(self, data: Tensor, source: int) -> None:
        for piece in data.split(_HALF) if data.numel() else ():
            slot = self._slots(torch.uint8, piece.numel())[source]
            if self.index == source:
                slot.copy_(piece)
            self._barrier.wait()
            if self.index != source:
                piece.copy_(slot)

    def barrier(self) -> None:
        self._barrier.wait()

    def check_in_step(self) -> None:
        self._barrier.check_in_step()

    def break_off(self, error: BaseException) -> None:
        self._barrier.break_off(error)

    def channel(self) -> Communicator:
        channel = join(self, self._timeout)
        if isinstance(channel, str):
            raise OSError(f"a second channel through shared memory cannot be made: {channel}")
        return channel

    def close(self) -> None:
        self._barrier.close()
        self.regions.close()


def join(base: PeerGroup, timeout: float) -> SharedMemoryCommunicator | str:
    """Shares memory among all towers of ``base``, or returns the reason why that is impossible, the same on all towers.

    Equal boot ids are not enough for it: each tower must be able to map the others' memory (:func:`map_segments`).

    Args:
        timeout: seconds for a collective.
    """
    local = {"host": machine.host_identity(), "device": base.device.type}
    towers = base.all_gather_json(local)
    if len({tower["host"] for tower in towers}) > 1:
        return SEVERAL_HOSTS
    if any(tower["device"] != "cpu" for tower in towers):
        return "only CPU towers share memory"
    try:
        segments, processes = map_segments(base, _Layout(base.size).total, waiting=base.size)
    except OSError as error:
        return str(error)
    return SharedMemoryCommunicator(base, timeout, segments, processes)
