"""A worker: calls the functions that the coordinator sends, with its own copies of what the scope has made."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mirrored.data.input_context import InputContext
from mirrored.parameter_server import references
from mirrored.parameter_server.layout import PlacedVariable
from mirrored.parameter_server.references import Reference
from mirrored.parameter_server.replica import Conditions, Replica
from mirrored.parameter_server.servers import Servers
from mirrored.strategy.kinds import OneDeviceStrategy
from towers.system import machine
from towers.system import tree as trees

_index: int | None = None


def current_worker_index() -> int | None:
    """The index of the worker that this process is; None elsewhere."""
    return _index


class Worker:
    """See above; an actor of Ray, made by :class:`mirrored.parameter_server.strategy.ParameterServerStrategy`.

    Args:
        index: from 0.
        workers: how many there are.
        servers: where variables are.
        seed: of the chief's random numbers; those of workers differ.
    """

    def __init__(self, index: int, workers: int, servers: Servers, seed: int | None) -> None:
        global _index
        _index = index
        machine.share_out_threads(workers)
        self._strategy = OneDeviceStrategy(seed=None if seed is None else seed + 1 + index)
        self._input = InputContext(workers, index, 1)
        self._replica = Replica(servers)
        self._pipelines: list[bytes] = []
        self._made: dict[Reference, Any] = {}

    def add_models(self, pickled: bytes, variables: Sequence[PlacedVariable]) -> None:
        """Make this worker's copies of models.

        Args:
            pickled: the outermost modules; variables are references that tell what they are.
            variables: those that no earlier model has.
        """
        tensors = dict(enumerate(self._replica.tensors))
        new = range(len(tensors), len(tensors) + len(variables))

        def resolve(reference: Reference) -> Tensor:
            _, index, kind, shape, stride, dtype, trainable = reference
            if index not in tensors:
                memory = torch.empty_strided(shape, stride, dtype=dtype)
                tensors[index] = nn.Parameter(memory, trainable) if kind == "parameter" else memory
            return tensors[index]

        roots: list[nn.Module] = references.load(pickled, resolve)
        self._replica.add(variables, [tensors[index] for index in new], roots)

    def add_optimizer(self, pickled: bytes) -> None:
        """Make this worker's copy of an optimizer."""
        self._replica.adopt(references.load(pickled, self._resolve))

    def add_pipeline(self, pickled: bytes) -> None:
        """Keep what ``create_per_worker_dataset`` was given until its data are asked for."""
        self._pipelines.append(pickled)

    def _resolve(self, reference: Reference) -> Any:
        (kind, index, *_), replica = reference, self._replica
        own: Any = {"module": replica.modules, "variable": replica.tensors, "optimizer": replica.optimizers}
        own |= {"strategy": [self._strategy], "coordinator": [None]}
        if kind in own:
            return own[kind][index]
        if reference not in self._made:
            self._made[reference] = self._load_data(index) if kind == "dataset" else self._iterate(index)
        return self._made[reference]

    def _load_data(self, index: int) -> Any:
        data = references.load(self._pipelines[index], self._resolve)
        if not callable(data):
            return data
        parameters = inspect.signature(data).parameters.values()
        return data(self._input) if any(p.default is p.empty for p in parameters) else data()

    def _iterate(self, index: int) -> Any:
        data = self._resolve(("dataset", index))
        if (iterator := iter(data)) is data:
            del self._made[("dataset", index)]  # it can be used once: another iterator is one over new data
        return iterator

    def call(self, pickled: bytes, conditions: Conditions) -> bytes:
        """Call a function.

        Args:
            pickled: the function, its arguments and keyword arguments.
            conditions: of the chief.

        Returns:
            What it returned, pickled, with tensors on the CPU.

        Raises:
            NotYet: this worker has to wait for others before it may begin.
            Exception: what the function has raised.
        """
        replica = self._replica
        replica.adopt_conditions(conditions)
        replica.expire()
        replica.refresh()
        fn, args, kwargs = references.load(pickled, self._resolve)
        try:
            result = fn(*args, **kwargs)
            replica.add_buffers()
        finally:
            replica.settle()
            written = replica.take_back()
        if written is not None:
            raise RuntimeError(
                f"a scheduled function wrote to {written} itself, which would stay on this worker: let an optimizer "
                "step it, or write to it on the chief, between two calls of the coordinator"
            )
        return references.dump(trees.map_leaves(lambda x: x.detach().cpu() if isinstance(x, Tensor) else x, result))
