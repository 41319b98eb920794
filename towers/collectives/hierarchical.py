"""Two levels of collectives, for several hosts: inside each host in shared memory, and across hosts.

[Note: two levels] A reduced value crosses the network once per host, however many towers the host has. The rest of its
way is shared memory. The first tower of each host, its *leader*, takes part in the collectives across hosts. Averages
are split among the towers of a host, see [Note: lanes]. Hosts may have different numbers of towers.

[Note: lanes] The towers of a host share the work. Each of the first few is a *lane*: it sums one chunk of every bucket
over the towers of its host, in their order. It averages the sum with the towers of the same lane on the other hosts. So
a bucket still crosses once per host, over several connections, and no part of it is copied more often than necessary::

    arrive                      this tower has filled a bucket
    sum the own chunk           once all towers of the host have filled it, from their memory into this tower's
    average it across hosts     with Gloo, whose threads run in parallel with the backward
    write it to the others      of this host, when it has arrived
    barrier                     once for all buckets

[Note: no tower waits in a backward] Whether the others have filled a bucket is checked whenever this tower has filled
one. This tower waits for the others when its backward is done. So all waits are in the main thread, one at a time, as
the search for deadlocks needs it. Buckets start in one order, on all towers of a lane.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from towers.collectives.arithmetic import chunk_of, reduce_into
from towers.collectives.communicator import Communicator, Deferred, Pending, in_step
from towers.collectives.process_group import ProcessGroupCommunicator
from towers.collectives.shared_memory.communicator import SharedMemoryCommunicator

LANES = 4
"""The largest number of lanes: further connections over one network gain nothing."""

_PIECE = 2**18  # bytes that are summed at a time, so that they stay in the cache


@dataclasses.dataclass
class _Bucket:
    """A bucket on its way.

    Attributes:
        tensor: this tower's memory of it. Its version does not count what is written here.
        arrival: the number of the arrival at the host's barrier that reported the bucket as filled.
        copies: the memory of all towers of this host, or of a single one; None if they do not share it.
        chunk: start and end of this tower's chunk, which is empty if the tower has none.
        pending: its average across hosts.
    """

    tensor: Tensor
    arrival: int
    copies: list[Tensor] | None
    chunk: tuple[int, int] = (0, 0)
    pending: Pending | None = None


class Crossing:
    """The averages of one tower, which are submitted and finished in the same order on all towers.

    Args:
        local: the towers of this host.
        lane: the towers of this tower's lane, if it is one.
        lanes: the number of lanes.
        size: the number of all towers.
    """

    def __init__(self, local: Communicator, lane: ProcessGroupCommunicator | None, lanes: int, size: int) -> None:
        self._local = local
        self._regions = local.regions if isinstance(local, SharedMemoryCommunicator) else None
        self._lane = lane
        self._lanes = lanes
        self._scale = 1.0 / size
        self._queue: list[_Bucket] = []
        self._next = 0  # the next bucket of the queue to start

    def submit(self, tensor: Tensor) -> None:
        """Takes a filled bucket, and starts all buckets that the towers of this host have filled so far."""
        arrival = 0
        if self._regions is not None:
            self._regions.barrier.arrive()
            arrival = self._regions.barrier.count
        self._queue.append(_Bucket(tensor.data, arrival, None if self._regions is not None else [tensor.data]))
        self._start(wait=False)

    def finish(self) -> None:
        """Waits until all submitted buckets are averaged."""
        self._start(wait=True)
        queue, self._queue, self._next = self._queue, [], 0
        for bucket in queue:
            if bucket.pending is not None:
                bucket.pending.wait()
            if bucket.copies is None:
                self._exchange(bucket.tensor)
            else:
                self._write_to_others(bucket, bucket.copies)
        if queue and self._regions is not None:
            self._regions.barrier.wait()
            self._regions.close_files()

    def _start(self, *, wait: bool) -> None:
        """Starts, in order, the buckets that all towers of this host have filled.

        Args:
            wait: whether to wait for the others to fill theirs.
        """
        for bucket in self._queue[self._next :]:
            if self._regions is not None:
                if not self._regions.barrier.passed(bucket.arrival, wait=wait):
                    return
                bucket.copies = self._regions.tensors_at(bucket.tensor)
                if bucket.copies is None and not wait:
                    return
            self._start_chunk(bucket)
            self._next += 1

    def _start_chunk(self, bucket: _Bucket) -> None:
        flat, itemsize = bucket.tensor, bucket.tensor.element_size()
        if self._lane is not None:
            bucket.chunk = chunk_of(flat.numel(), itemsize, self._lanes, self._local.index)
        start, end = bucket.chunk
        if bucket.copies is None:  # no memory for a region on some tower: a slower way, for the whole bucket
            self._local.all_reduce(flat.mul_(self._scale))
        else:
            for at in range(start, end, _PIECE // itemsize):
                pieces = [copy[at : min(at + _PIECE // itemsize, end)] for copy in bucket.copies]
                reduce_into(pieces[self._local.index], pieces, "sum", scale=self._scale)
        if self._lane is not None and start < end:
            bucket.pending = self._lane.submit_average(flat[start:end])

    def _write_to_others(self, bucket: _Bucket, copies: Sequence[Tensor]) -> None:
        start, end = bucket.chunk
        for tower, copy in enumerate(copies):
            if tower != self._local.index:
                copy[start:end].copy_(bucket.tensor[start:end])

    def _exchange(self, flat: Tensor) -> None:
        """Fetches the other lanes' chunks of a bucket that is not shared."""
        for lane in range(self._lanes):
            start, end = chunk_of(flat.numel(), flat.element_size(), self._lanes, lane)
            self._local.broadcast(flat[start:end], lane)


class HierarchicalCommunicator(Communicator):
    """Collectives of all towers, composed of those inside this host and those across hosts.

    Args:
        group: all towers; the leaders' group is made from it.
        hosts: the towers of each host, in ascending order; the first is its leader.
        local: a communicator of the towers of this host through shared memory, or of a single tower.
    """

    def __init__(self, group: ProcessGroupCommunicator, hosts: Sequence[Sequence[int]], local: Communicator) -> None:
        self.index, self.size, self.device = group.index, group.size, group.device
        self.towers, self.health = group.towers, group.health
        self._group = group
        self.backend = f"shared memory in and gloo across {len(hosts)} hosts"
        self.prescale, self.bucket_bytes = local.prescale, group.bucket_bytes
        self._hosts = [list(towers) for towers in hosts]
        self._host = next(number for number, towers in enumerate(hosts) if group.index in towers)
        self._local = local
        lanes = min(LANES, *map(len, hosts))
        self._lane = group.among([[towers[lane] for towers in hosts] for lane in range(lanes)])
        self._across = self._lane if local.index == 0 else None
        self._crossing = Crossing(local, self._lane, lanes, self.size)

    @in_step
    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        dense = tensor.contiguous()
        self._local.all_reduce(dense, op)
        if self._across is not None:
            self._across.all_reduce(dense, op)
        self._local.broadcast(dense)
        if dense is not tensor:
            tensor.copy_(dense)

    def allocate(self, key: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return self._local.allocate(key, numel, dtype, device)

    def release(self, key: int) -> None:
        self._local.release(key)

    @in_step
    def submit_average(self, tensor: Tensor) -> Pending:
        self._crossing.submit(tensor)
        return Deferred(self.finish_submitted)

    @in_step
    def finish_submitted(self) -> None:
        """Averages all submitted tensors."""
        self._crossing.finish()

    @in_step
    def all_gather(self, tensor: Tensor) -> Tensor:
        rows = self._local.all_gather(tensor)
        largest = max(len(towers) for towers in self._hosts)
        everywhere = tensor.new_empty((len(self._hosts), largest, *tensor.shape))
        if self._across is not None:
            padded = tensor.new_zeros((largest, *tensor.shape))
            padded[: len(rows)] = rows
            everywhere = self._across.all_gather(padded)
        self._local.broadcast(everywhere)
        gathered = tensor.new_empty((self.size, *tensor.shape))
        for host, towers in enumerate(self._hosts):
            gathered[towers] = everywhere[host, : len(towers)]
        return gathered

    @in_step
    def all_to_all(self, rows: Tensor) -> Tensor:
        return self._group.all_to_all(rows)

    @in_step
    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        host = next(number for number, towers in enumerate(self._hosts) if source in towers)
        if host == self._host:
            self._local.broadcast(tensor, self._hosts[host].index(source))
        if self._across is not None:
            self._across.broadcast(tensor, host)
        if host != self._host:
            self._local.broadcast(tensor)

    def channel(self) -> Communicator:
        return HierarchicalCommunicator(self._group.channel(), self._hosts, self._local.channel())

    def break_off(self, error: BaseException) -> None:
        super().break_off(error)
        self._local.break_off(error)

    def close(self) -> None:
        self._local.close()
        if self._lane is not None:
            self._lane.close()
