"""Two levels of collectives, for several hosts: reduce inside each host, then across hosts, then broadcast inside.

[Note: two levels] A reduced value crosses the network once per host, however many towers the host has. The rest of its
way is shared memory. The first tower of each host, its *leader*, takes part in the collectives across hosts. Averages
are split among the towers of a host: [Note: lanes] in :mod:`towers.collectives.crossing`. Hosts may have different
numbers of towers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from towers.collectives.communicator import Communicator, Deferred, Pending, in_step
from towers.collectives.crossing import LANES, Crossing
from towers.collectives.process_group import ProcessGroupCommunicator


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
        groups = [group.among([towers[lane] for towers in hosts]) for lane in range(lanes)]
        self._across = groups[0]
        self._groups = [lane for lane in groups if lane is not None]
        self._crossing = Crossing(local, groups[local.index] if local.index < lanes else None, lanes, self.size)

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
        for group in self._groups:
            group.close()
