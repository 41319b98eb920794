"""Collectives of towers on accelerators, made by their hosts: for devices without collectives, and shared ones.

[Note: staged by the host] A bucket goes to pinned memory as soon as it is packed, on a stream of its own, while the
backward goes on. What the CPU towers of these hosts would do (shared memory, Gloo) averages it there, and it goes back
on the stream that asked for it. So several towers can share one device, which NCCL refuses, and a device needs no
collectives of its own. The host waits for each bucket; where collectives between devices exist they are faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from towers.collectives.communicator import Communicator, Deferred, Pending, in_step
from towers.system.host_copy import HostCopy, on_device


class HostStagedCommunicator(Communicator):
    """The collectives of ``hosts`` for tensors on ``device``; tensors of the CPU take the direct way.

    Args:
        hosts: the same towers on their CPUs.
        device: this tower's accelerator.
    """

    def __init__(self, hosts: Communicator, device: torch.device) -> None:
        self.index, self.size, self.device = hosts.index, hosts.size, device
        self.towers, self.health, self.name = hosts.towers, hosts.health, hosts.name
        self.backend = f"{hosts.backend}, staged by the host"
        self.prescale = hosts.prescale
        self._hosts = hosts
        self._stream = torch.Stream(device)
        self._queue: list[tuple[Tensor, HostCopy]] = []

    def _through_host(self, tensor: Tensor, collective: Callable[[Tensor], object]) -> None:
        """Let a collective change a tensor in place."""
        host = HostCopy(tensor.detach()).get()
        collective(host)
        if tensor.device.type != "cpu":
            tensor.detach().copy_(host, non_blocking=True)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        self._through_host(tensor, lambda host: self._hosts.all_reduce(host, op))

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        self._through_host(tensor, lambda host: self._hosts.broadcast(host, source))

    def all_gather(self, tensor: Tensor) -> Tensor:
        return on_device(self._hosts.all_gather(HostCopy(tensor).get()), tensor.device)

    def all_to_all(self, rows: Tensor) -> Tensor:
        return on_device(self._hosts.all_to_all(HostCopy(rows).get()), rows.device)

    def sum_by_tree(self, tensors: Sequence[Tensor]) -> None:
        copies = [HostCopy(tensor) for tensor in tensors]
        self._hosts.sum_by_tree([copy.get() for copy in copies])
        for tensor, copy in zip(tensors, copies, strict=True):
            if tensor.device.type != "cpu":
                tensor.copy_(copy.get(), non_blocking=True)

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        return self._hosts.all_gather_bytes(data)

    def barrier(self) -> None:
        self._hosts.barrier()

    def submit_average(self, tensor: Tensor) -> Pending:
        if tensor.device.type == "cpu":
            return self._hosts.submit_average(tensor)
        self._stream.wait_stream(torch.accelerator.current_stream(tensor.device))
        with self._stream:
            self._queue.append((tensor, HostCopy(tensor)))
        if tensor.device.type != "tpu":  # see [Note: a TPU has one order]
            tensor.record_stream(self._stream)
        return Deferred(self.finish_submitted)

    @in_step
    def finish_submitted(self) -> None:
        """Average all that was submitted: while one bucket is averaged, the next come and the last goes back."""
        queue, self._queue = self._queue, []
        averages = [self._hosts.submit_average(copy.get()) for _, copy in queue]
        for (tensor, copy), average in zip(queue, averages, strict=True):
            average.wait()
            tensor.copy_(copy.get(), non_blocking=True)

    def channel(self) -> Communicator:
        return HostStagedCommunicator(self._hosts.channel(), self.device)

    def check_in_step(self) -> None:
        super().check_in_step()
        self._hosts.check_in_step()

    def break_off(self, error: BaseException) -> None:
        super().break_off(error)
        self._hosts.break_off(error)

    def close(self) -> None:
        self._hosts.close()
