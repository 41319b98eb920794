"""Collectives that the hosts of accelerators run: for devices without collectives, and for shared devices.

[Note: staged by the host] A bucket is copied to pinned memory as soon as it is packed, on a separate stream, while the
backward continues. There it is averaged in the same way as for CPU towers of these hosts (shared memory, Gloo), and
copied back on the stream that requested it. So several towers can share one device, which NCCL refuses, and a device
needs no collectives itself. The host waits for each bucket. If collectives between devices exist, they are faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from towers.collectives.communicator import Communicator, Deferred, Pending, in_step
from towers.system.tensors import HostCopy, on_device


class HostStagedCommunicator(Communicator):
    """The collectives of ``hosts`` for tensors on ``device``. Tensors on the CPU are passed to ``hosts`` directly.

    Args:
        hosts: a communicator of the same towers on their CPUs.
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
        """Lets a collective change a tensor in place."""
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
        if tensor.device.type != "tpu":  # [Note: a TPU has one order], accelerator.py
            tensor.record_stream(self._stream)
        return Deferred(self.finish_submitted)

    @in_step
    def finish_submitted(self) -> None:
        """Averages all submitted tensors. One bucket is averaged while the next arrive and the last is copied back."""
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
