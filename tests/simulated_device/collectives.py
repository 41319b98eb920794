"""A backend of torch.distributed between simulated devices, as NCCL is between GPUs.

A collective is queued behind the work of the stream that is current when it is called, and runs on a stream of the
group's own; ``wait()`` lets the current stream wait for it, and not the host. A use of a result without it sees what
was there before. Numbers travel through Gloo.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.simulated_device import load

NAME = "simccl"


def register(*names: str) -> None:
    """From now on strategies on simulated devices use it. As a TPU it has names of its own."""
    if not names:
        from towers.collectives import process_group  # loads what an installed accelerator is loaded before

        process_group.COMPLETE.add(NAME)
    for name in names or (NAME,):
        if name not in dist.Backend.backend_list:
            dist.Backend.register_backend(name, SimulatedCollectives, devices=["tpu" if names else "sim"])


@contextlib.contextmanager
def _by_the_device() -> Iterator[None]:
    """The calls in here are not recorded as the script's."""
    sim = load()
    before = sim.set_in_operator(True)
    try:
        yield
    finally:
        sim.set_in_operator(before)


class _Queued(dist._Work):
    """A collective on the group's stream."""

    def __init__(self, stream: torch.Stream, written: list[Tensor]) -> None:
        super().__init__()
        self._done = stream.record_event()
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=[stream.device])
        with stream:
            self._future.set_result(written)

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        return self._future

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

    def _queue(self, name: str, read: list[Tensor], written: list[Tensor], collective: Callable[..., Any]) -> Any:
        """Do ``collective(copies of read, memory for written)`` on the group's stream."""
        if written[0].device.type == "cpu":
            return collective(read, written)
        outside = torch.accelerator.current_stream()
        stream = self._stream = self._stream or torch.Stream(written[0].device)
        load().note("collective", name, max(sum(t.nbytes for t in tensors) for tensors in (read, written)))
        with _by_the_device(), stream:
            stream.wait_stream(outside)
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
            return _Queued(stream, written)

    def _queue_in_place(self, name: str, tensors: list[Tensor], collective: Callable[..., Any], opts: Any) -> Any:
        def on_copies(read: list[Tensor], written: list[Tensor]) -> Any:
            for source, target in zip(read, written, strict=True):
                target.copy_(source)
            return collective(written, opts)

        return self._queue(name, tensors, tensors, on_copies)

    def _averaging(self, collective: Callable[..., Any], opts: Any) -> Callable[..., Any]:
        """``collective(targets, opts)``, and where ``opts`` asks for the mean, which Gloo does not have, a division."""
        if opts.reduceOp != dist.ReduceOp.AVG:
            return collective
        summing = type(opts)()
        summing.reduceOp, summing.timeout = dist.ReduceOp.SUM, opts.timeout

        def average(targets: list[Tensor], _: Any) -> Any:
            collective(targets, summing).wait()
            for target in targets:
                target /= self.size()
            done: torch.futures.Future[None] = torch.futures.Future()
            done.set_result(None)  # to wait for Gloo's work again would copy its sum again
            return done

        return average

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        return self._queue_in_place("all-reduce", tensors, self._averaging(self._gloo.allreduce, opts), opts)

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        return self._queue_in_place("broadcast", tensors, self._gloo.broadcast, opts)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        def collective(read: list[Tensor], written: list[Tensor]) -> Any:
            return self._gloo.allgather([written], read)

        return self._queue("all-gather of a list", inputs, outputs[0], collective)

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> Any:
        def collective(read: list[Tensor], written: list[Tensor]) -> Any:
            return self._gloo._allgather_base(written[0].view(-1), read[0].view(-1))

        return self._queue("all-gather", [tensor], [output], collective)

    all_gather_single = _allgather_base  # its name since torch 2.13

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any) -> Any:
        def collective(read: list[Tensor], written: list[Tensor]) -> Any:
            def sum_of_chunks(targets: list[Tensor], opts: Any) -> Any:
                return self._gloo._reduce_scatter_base(*targets, *read, opts)

            return self._averaging(sum_of_chunks, opts)(written, opts)

        return self._queue("reduce-scatter", [tensor], [output], collective)

    reduce_scatter_single = _reduce_scatter_base

    def alltoall_base(self, output: Tensor, tensor: Tensor, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        def collective(read: list[Tensor], written: list[Tensor]) -> Any:
            return self._gloo.alltoall_base(*written, *read, outputs, inputs)

        return self._queue("all-to-all", [tensor], [output], collective)

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
