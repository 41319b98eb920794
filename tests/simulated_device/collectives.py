"""A backend of torch.distributed between simulated devices, as NCCL is between GPUs.

A collective is queued behind the work of the stream that is current when it is called, and runs on a stream of the
group's own; ``wait()`` lets the current stream wait for it, and not the host. A use of a result without it sees what
was there before. Numbers travel through Gloo.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "simccl"


def register(*names: str) -> None:
    """From now on strategies on simulated devices use it. As a TPU it has names of its own."""
    for name in names or (NAME,):
        if name not in dist.Backend.backend_list:
            dist.Backend.register_backend(name, SimulatedCollectives, devices=["tpu" if names else "sim"])


class _Queued(dist._Work):
    """A collective on the group's stream."""

    def __init__(self, done: torch.Event) -> None:
        super().__init__()
        self._done = done

    def wait(self, timeout: Any = None) -> bool:
        torch.accelerator.current_stream().wait_event(self._done)
        return True

    def is_completed(self) -> bool:
        return self._done.query()


class SimulatedCollectives(dist.ProcessGroup):
    """The group, for tensors on devices; those of the CPU are Gloo's."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._stream: torch.Stream | None = None
        self._name = ""

    def _queue(self, read: list[Tensor], written: list[Tensor], collective: Callable[..., Any]) -> Any:
        """Do ``collective(copies of read, memory for written)`` on the group's stream."""
        if written[0].device.type == "cpu":
            return collective(read, written)
        stream = self._stream = self._stream or torch.Stream(written[0].device)
        stream.wait_stream(torch.accelerator.current_stream())
        with stream:
            sources, targets = (
                [torch.empty(t.shape, dtype=t.dtype, device="cpu", pin_memory=True) for t in tensors]
                for tensors in (read, written)
            )
            for tensor, source in zip(read, sources, strict=True):
                source.copy_(tensor, non_blocking=True)
            stream.record_event().synchronize()
            collective(sources, targets).wait()
            for tensor, target in zip(written, targets, strict=True):
                with torch.autograd._unsafe_preserve_version_counter(tensor):  # a device's collective counts nothing
                    tensor.copy_(target, non_blocking=True)
                if tensor.device.type == "sim":  # as a TPU it has one order of work
                    tensor.record_stream(stream)
            return _Queued(stream.record_event())

    def _queue_in_place(self, tensors: list[Tensor], collective: Callable[..., Any], opts: Any) -> Any:
        def on_copies(read: list[Tensor], written: list[Tensor]) -> Any:
            for source, target in zip(read, written, strict=True):
                if source is not target:
                    target.copy_(source)
            return collective(written, opts)

        return self._queue(tensors, tensors, on_copies)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return self._queue_in_place(tensors, self._gloo.allreduce, opts)

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        return self._queue_in_place(tensors, self._gloo.broadcast, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        assert inputs[0].device.type == "cpu", "one tensor for all rows is quicker"
        return self._gloo.allgather(outputs, inputs)

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        return self._queue([tensor], [output], lambda read, written: self._gloo._allgather_base(*written, *read))

    all_gather_single = _allgather_base  # its name since torch 2.13

    def alltoall_base(self, output: Tensor, tensor: Tensor, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        def collective(read: list[Tensor], written: list[Tensor]) -> Any:
            return self._gloo.alltoall_base(*written, *read, outputs, inputs)

        return self._queue([tensor], [output], collective)

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier()

    def getBackendName(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:  # type: ignore[override]
        return self._name

    def _set_group_desc(self, description: str) -> None:
        pass

    def shutdown(self) -> None:
        self._gloo.shutdown()
