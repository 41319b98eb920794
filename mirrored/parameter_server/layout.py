"""The assignment of variables' parts to servers, and the transfer format of tensors by part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mirrored.parameter_server.partitioners import Partitioner
from mirrored.shares import bounds
from towers.collectives.communicator import as_bytes


@dataclass(frozen=True)
class Part:
    """Rows of a variable, on one server.

    Attributes:
        variable: the index of the variable.
        start, end: the first row, and the row after the last; both are 0 for the whole variable.
        server: the index of the server that stores the part.
    """

    variable: int
    start: int
    end: int
    server: int

    def of(self, tensor: Tensor) -> Tensor:
        """Returns this part of the variable, or of another tensor of its shape."""
        if not self.end:
            return tensor
        if tensor.is_sparse:
            return torch.narrow_copy(tensor.coalesce(), 0, self.start, self.end - self.start)
        return tensor[self.start : self.end]


class Values(dict[Part, Tensor]):
    """Tensors by part. Sparse tensors are coalesced.

    They are pickled as NumPy arrays, which Ray sends without conversion. torch's own pickles are archives of bytes for
    each tensor.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack_all, ({part: _pack(tensor) for part, tensor in self.items()},)


def _unpack_all(packed: Mapping[Part, Any]) -> Values:
    return Values({part: _unpack(*entry) for part, entry in packed.items()})


def _pack(tensor: Tensor) -> tuple[Any, Any, tuple[int, ...]]:
    if tensor.is_sparse:
        return _pack(tensor.coalesce().indices()), _pack(tensor.coalesce().values()), tuple(tensor.shape)
    return as_bytes(tensor.cpu()).numpy(), tensor.dtype, tuple(tensor.shape)  # NumPy does not support bfloat16


def _unpack(memory: Any, kind: Any, shape: tuple[int, ...]) -> Tensor:
    if isinstance(memory, tuple):
        parts = _unpack(*memory), _unpack(*kind)
        return torch.sparse_coo_tensor(*parts, shape, is_coalesced=True, check_invariants=False)
    return torch.tensor(memory).view(kind).reshape(shape)  # a copy, because the memory received from Ray is read-only


@dataclass(frozen=True)
class PlacedVariable:
    """A parameter or buffer, and the servers of its parts.

    Attributes:
        name: its path in its model.
        trained: whether optimizers may step it; otherwise, forwards write to it.
        table: whether only the rows that are looked up are exchanged.
        parts: one part, or several along dimension 0.
        like: a tensor of its shape, strides and dtype, without memory.
        is_parameter: whether its class is ``nn.Parameter``.
    """

    name: str
    trained: bool
    table: bool
    parts: tuple[Part, ...]
    like: Tensor
    is_parameter: bool

    def allocate(self) -> Tensor:
        """Returns a new tensor of this kind, without values. A parameter does not require a gradient yet."""
        memory = torch.empty_like(self.like, device="cpu")
        return nn.Parameter(memory, requires_grad=False) if self.is_parameter else memory


def lay_out(
    names: Mapping[Tensor, str],
    first: int,
    tables: Set[int],
    buffers: Set[int],
    turn: Iterator[int],
    partitioner: Partitioner | None,
) -> list[PlacedVariable]:
    """Assigns variables to servers.

    Args:
        names: the variables with their names.
        first: the index of the first variable.
        tables: the ids of the parameters of which only rows are exchanged.
        buffers: the ids of the parameters that forwards write to.
        turn: yields the server of each part.

    Raises:
        RuntimeError: a variable of a lazy module has no shape yet.
        ValueError: the partitioner splits a variable along another dimension than the first, or into more parts than
            rows.
    """
    variables = []
    for index, (tensor, name) in enumerate(names.items(), first):
        if is_lazy(tensor):
            raise RuntimeError(f"{name} has no shape yet: call its model in the scope, or before the first schedule()")
        shape, shards = tuple(tensor.shape), [1]
        trained = isinstance(tensor, nn.Parameter) and id(tensor) not in buffers
        if partitioner is not None and trained and shape and shape[0]:
            shards = [*partitioner(shape, tensor.dtype)]
            if len(shards) != len(shape) or not 1 <= shards[0] <= shape[0] or any(n != 1 for n in shards[1:]):
                raise ValueError(
                    f"variable_partitioner splits {name}, of shape {shape}, into {shards}, but variables are "
                    "split along dimension 0 only: it must return [shards, 1, …], a number for each dimension"
                )
        cuts = [bounds(shape[0], shards[0], i) for i in range(shards[0])] if shards[0] > 1 else [(0, 0)]
        parts = tuple(Part(index, start, end, next(turn)) for start, end in cuts)
        like = tensor.detach().to("meta")
        of_class = isinstance(tensor, nn.Parameter)
        variables.append(PlacedVariable(name, trained, id(tensor) in tables, parts, like, of_class))
    return variables


def split_state(state: Mapping[str, Any], parameter: Tensor, part: Part) -> dict[str, Any]:
    """Returns a part's share of an optimizer's state of a parameter."""
    own = {key: part.of(value) if _is_like(value, parameter) else value for key, value in state.items()}
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in own.items()}


def _is_like(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def join_state(parts: Sequence[tuple[Part, Mapping[str, Any]]], parameter: Tensor) -> dict[str, Any]:
    """Joins the state of a whole parameter. Values of another shape (the number of steps) are the first part's."""
    state = dict(parts[0][1])
    for key, value in state.items():
        if len(parts) > 1 and _is_like(value, parts[0][0].of(parameter)):
            state[key] = torch.cat([other[key] for _, other in parts])
    return state
