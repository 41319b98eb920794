"""Which server has which part of which variable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mirrored.parameter_server.partitioners import Partitioner
from mirrored.shares import bounds
from towers.system.named import Named


@dataclass(frozen=True)
class Part:
    """Rows of a variable, on one server.

    Attributes:
        variable: its index.
        start, end: the rows; both 0: all of it.
        server: the index of the server that has it.
    """

    variable: int
    start: int
    end: int
    server: int

    def of(self, tensor: Tensor) -> Tensor:
        """This part of the variable or of something with its shape."""
        if not self.end:
            return tensor
        if tensor.is_sparse:
            return torch.narrow_copy(tensor.coalesce(), 0, self.start, self.end - self.start)
        return tensor[self.start : self.end]


@dataclass(frozen=True)
class PlacedVariable:
    """A parameter or buffer, and where its parts are.

    Attributes:
        name: its path in its model.
        kind: "parameter" or "buffer".
        table: only the rows that are looked up are exchanged.
        parts: whole, or cut along dimension 0.
    """

    name: str
    kind: str
    table: bool
    parts: tuple[Part, ...]


def lay_out(
    named: Sequence[Named], first: int, tables: Set[int], turn: Iterator[int], partitioner: Partitioner | None
) -> list[PlacedVariable]:
    """Give variables to servers.

    Args:
        first: the index of the first of them.
        tables: the ids of the parameters of which only rows are exchanged.
        turn: the server of each part.

    Raises:
        ValueError: the partitioner cuts a variable along another dimension than the first.
    """
    variables = []
    for index, entry in enumerate(named, first):
        shape, shards = tuple(entry.tensor.shape), [1]
        if partitioner is not None and entry.kind == "parameter" and shape and shape[0]:
            shards = [*partitioner(shape, entry.tensor.dtype)]
            if len(shards) != len(shape) or not 1 <= shards[0] <= shape[0] or any(n != 1 for n in shards[1:]):
                raise ValueError(
                    f"variable_partitioner cuts {entry.name}, of shape {shape}, into {shards}, but variables are cut "
                    "along dimension 0 only: it has to return [shards, 1, …], a number for each dimension"
                )
        cuts = [bounds(shape[0], shards[0], i) for i in range(shards[0])] if shards[0] > 1 else [(0, 0)]
        parts = tuple(Part(index, start, end, next(turn)) for start, end in cuts)
        variables.append(PlacedVariable(entry.name, entry.kind, id(entry.tensor) in tables, parts))
    return variables


def split_state(state: Mapping[str, Any], parameter: Tensor, part: Part) -> dict[str, Any]:
    """A part's share of the state that an optimizer has for a parameter."""
    own = {key: part.of(value) if _is_like(value, parameter) else value for key, value in state.items()}
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in own.items()}


def _is_like(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def join_state(parts: Sequence[tuple[Part, Mapping[str, Any]]], parameter: Tensor) -> dict[str, Any]:
    """The state of a whole parameter; what is not of its shape (the number of steps) is the first part's."""
    state = dict(parts[0][1])
    if len(parts) > 1:
        for key, value in state.items():
            if _is_like(value, parts[0][0].of(parameter)):
                state[key] = torch.cat([other[key] for _, other in parts])
    return state
