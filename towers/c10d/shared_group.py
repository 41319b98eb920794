"""The collectives of c10d through shared memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from towers.c10d.group import Group
from towers.c10d.tensors import (
    check_numel,
    checked,
    of_any_device,
    operation,
    outputs_of,
    signature,
    single,
    split,
)
from towers.c10d.works import CompletedWork
from towers.collectives.communicator import as_bytes
from towers.collectives.shared_memory.communicator import SharedMemoryCommunicator
from towers.errors import ArgumentError
from towers.gradients.sparse import sum_rows
from towers.system.tensors import contiguous


class SharedMemoryGroup(Group):
    """A c10d process group whose ranks share memory."""

    @of_any_device
    def allreduce(self, tensors: Any, opts: Any = None) -> CompletedWork:  # type: ignore[override]
        if not isinstance(tensors, Tensor) and len(tensors) == 1 and tensors[0].layout == torch.sparse_coo:
            return self._sparse_allreduce(tensors[0], opts)
        return self._all_reduce("all_reduce", [single("all_reduce", tensors)], opts)

    @of_any_device
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> CompletedWork:
        return self._all_reduce("all_reduce_coalesced", checked("all_reduce_coalesced", tensors), opts)

    def _all_reduce(self, call: str, tensors: Sequence[Tensor], opts: Any) -> CompletedWork:
        op = operation(call, opts, *tensors)

        def task(comm: SharedMemoryCommunicator) -> None:
            for tensor in tensors:
                comm.all_reduce(tensor, op)

        return self.do(call, opts, task, tensors, f"{op} {signature(*tensors)}")

    def _sparse_allreduce(self, tensor: Tensor, opts: Any) -> CompletedWork:
        if operation("all_reduce", opts, tensor) != "sum":
            raise ArgumentError("all_reduce: sparse tensors can only be summed (ReduceOp.SUM)")

        def task(comm: SharedMemoryCommunicator) -> None:
            total = sum_rows(comm, tensor)
            # copy_ replaces the memory of a sparse tensor. Memory from inference mode could not be used outside of it.
            with torch.inference_mode(tensor.is_inference()), torch.no_grad():
                tensor.copy_(total)  # not detached, because that would be another sparse tensor

        return self.do("all_reduce", opts, task, [tensor], f"sparse {signature(tensor)}")

    @of_any_device
    def broadcast(self, tensors: Any, opts: Any) -> CompletedWork:  # type: ignore[override]
        tensor = single("broadcast", tensors)
        root = self.root("broadcast", opts)

        def task(comm: SharedMemoryCommunicator) -> None:
            comm.broadcast(tensor, root)

        return self.do("broadcast", opts, task, [tensor], f"from {root} {signature(tensor)}")

    @of_any_device
    def reduce(self, tensors: Any, opts: Any) -> CompletedWork:  # type: ignore[override]
        tensor = single("reduce", tensors)
        root, op = self.root("reduce", opts), operation("reduce", opts, tensor)

        def task(comm: SharedMemoryCommunicator) -> None:
            total = contiguous(tensor).clone()
            comm.all_reduce(total, op)
            if comm.index == root:
                tensor.detach().copy_(total)

        return self.do("reduce", opts, task, [tensor], f"{op} to {root} {signature(tensor)}")

    @of_any_device
    def allgather(self, outputs: Sequence[Any], inputs: Any, opts: Any = None) -> CompletedWork:
        tensor = single("all_gather", inputs)
        if outputs and isinstance(outputs[0], Tensor):
            outputs = [outputs]
        rows = self._only_list("all_gather", outputs, tensor)
        return self._all_gather("all_gather", [rows], [tensor], opts)

    @of_any_device
    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> CompletedWork:
        call = "all_gather_coalesced"
        columns = [[row[i] for row in output_lists] for i in range(len(inputs))]
        for column, tensor in zip(columns, inputs, strict=True):
            checked(call, [*column, tensor], like=tensor)
            checked(call, column, count=self.size())
        return self._all_gather(call, columns, inputs, opts)

    def _all_gather(
        self, call: str, columns: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> CompletedWork:
        """Gathers each of ``inputs`` into the tensors of one of ``columns``."""

        def task(comm: SharedMemoryCommunicator) -> None:
            for rows, tensor in zip(columns, inputs, strict=True):
                with outputs_of(rows) as dense:
                    if all(row.numel() == tensor.numel() for row in rows):
                        comm.all_gather_into(dense, tensor)
                    else:  # then the numbers differ on all ranks
                        comm.exchange([as_bytes(tensor)] * comm.size, [as_bytes(row) for row in dense])

        rows = [row for column in columns for row in column]
        return self.do(call, opts, task, rows, signature(*rows))

    @of_any_device
    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> CompletedWork:
        return self.allgather_into_tensor_coalesced([output], [tensor], opts)

    @of_any_device
    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> CompletedWork:
        call = "all_gather_into_tensor"
        for output, tensor in zip(outputs, inputs, strict=True):
            checked(call, [output, tensor], like=tensor)
            check_numel(call, output, tensor.numel() * self.size())

        def task(comm: SharedMemoryCommunicator) -> None:
            with outputs_of(outputs) as all_dense:
                for dense, tensor in zip(all_dense, inputs, strict=True):
                    comm.all_gather_into(dense.view(comm.size, -1).unbind(0) if dense.numel() else [], tensor)

        return self.do(call, opts, task, outputs, signature(*inputs))

    @of_any_device
    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Any, opts: Any) -> CompletedWork:  # type: ignore[override]
        tensor, root = single("gather", inputs), self.root("gather", opts)
        rows = self._only_list("gather", outputs, tensor) if self.rank() == root else []
        return self._exchange("gather", opts, {root: tensor}, dict(enumerate(rows)), f"to {root}")

    @of_any_device
    def scatter(self, outputs: Any, inputs: Sequence[Sequence[Tensor]], opts: Any) -> CompletedWork:  # type: ignore[override]
        tensor, root = single("scatter", outputs), self.root("scatter", opts)
        rows = self._only_list("scatter", inputs, tensor) if self.rank() == root else []
        return self._exchange("scatter", opts, dict(enumerate(rows)), {root: tensor}, f"from {root}")

    def _exchange(
        self, call: str, opts: Any, sent: Mapping[int, Tensor], received: Mapping[int, Tensor], signature: str = ""
    ) -> CompletedWork:
        """Sends a tensor to some ranks, and receives one from some, each by its rank."""

        def task(comm: SharedMemoryCommunicator) -> None:
            nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
            with outputs_of(list(received.values())) as dense:
                filled = dict(zip(received, dense, strict=True))
                comm.exchange(
                    [as_bytes(sent.get(rank, nothing)) for rank in range(comm.size)],
                    [as_bytes(filled.get(rank, nothing)) for rank in range(comm.size)],
                )

        return self.do(call, opts, task, list(received.values()), signature)

    @of_any_device
    def reduce_scatter(self, outputs: Any, inputs: Sequence[Any], opts: Any = None) -> CompletedWork:  # type: ignore[override]
        output = single("reduce_scatter", outputs)
        if inputs and isinstance(inputs[0], Tensor):
            inputs = [inputs]
        rows = self._only_list("reduce_scatter", inputs, output)
        check_numel("reduce_scatter", output, rows[self.rank()].numel())
        op = operation("reduce_scatter", opts, output)

        def task(comm: SharedMemoryCommunicator) -> None:
            if all(row.numel() == rows[0].numel() for row in rows):
                stacked = torch.stack([contiguous(row).view(-1) for row in rows])
                output.detach().copy_(comm.reduce_scatter(stacked, op).view(output.shape))
                return
            for tower, row in enumerate(rows):
                total = contiguous(row).clone()
                comm.all_reduce(total, op)
                if tower == comm.index:
                    output.detach().copy_(total.view(output.shape))

        return self.do("reduce_scatter", opts, task, [output], f"{op} {signature(*rows)}")

    @of_any_device
    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> CompletedWork:
        return self.reduce_scatter_tensor_coalesced([output], [tensor], opts)

    @of_any_device
    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> CompletedWork:
        call = "reduce_scatter_tensor"
        for output, tensor in zip(outputs, inputs, strict=True):
            checked(call, [output, tensor], like=tensor)
            check_numel(call, tensor, output.numel() * self.size())
        op = operation(call, opts, *inputs)

        def task(comm: SharedMemoryCommunicator) -> None:
            for output, tensor in zip(outputs, inputs, strict=True):
                rows = contiguous(tensor).view(comm.size, -1) if tensor.numel() else tensor.new_empty((comm.size, 0))
                output.detach().copy_(comm.reduce_scatter(rows, op).view(output.shape))

        return self.do(call, opts, task, outputs, f"{op} {signature(*inputs)}")

    @of_any_device
    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> CompletedWork:
        outputs = checked("all_to_all", outputs, count=self.size())
        inputs = checked("all_to_all", inputs, like=outputs[0], count=self.size())
        return self._exchange("all_to_all", opts, dict(enumerate(inputs)), dict(enumerate(outputs)))

    @of_any_device
    def alltoall_base(
        self,
        output: Tensor,
        tensor: Tensor,
        output_sizes: Sequence[int] | None = None,
        input_sizes: Sequence[int] | None = None,
        opts: Any = None,
    ) -> CompletedWork:
        call = "all_to_all_single"
        checked(call, [output, tensor], like=tensor)
        outputs = split(call, output, output_sizes, self.size())
        return self.alltoall(outputs, split(call, tensor, input_sizes, self.size()), opts)

    # torch 2.13 calls these methods by other names.
    all_gather_single = _allgather_base  # type: ignore[assignment]
    all_gather_single_coalesced = allgather_into_tensor_coalesced  # type: ignore[assignment]
    reduce_scatter_single = _reduce_scatter_base  # type: ignore[assignment]
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced  # type: ignore[assignment]
    all_to_all_single = alltoall_base  # type: ignore[assignment]

    def _only_list(self, call: str, lists: Sequence[Sequence[Tensor]], model: Tensor) -> list[Tensor]:
        """Returns the only list of ``lists``: a tensor for each rank.

        Raises:
            ArgumentError: there are more lists, or their tensors do not fit ``model``.
        """
        if len(lists) != 1:
            raise ArgumentError(f"{call}: takes a single list of tensors, not {len(lists)}")
        return checked(call, lists[0], like=model, count=self.size())
