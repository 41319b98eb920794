"""A worker, which runs the coordinator's functions with its own copies of the objects of the scope."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import ray
from torch import Tensor

from mirrored.data.distribute import InputContext
from mirrored.parameter_server.layout import PlacedVariable
from mirrored.parameter_server.replica import Call, Replica
from mirrored.parameter_server.servers import Reference, Servers, pickle_by_reference, unpickle
from mirrored.strategy.kinds import OneDeviceStrategy
from towers.system import tree as trees

_index: int | None = None


def current_worker_index() -> int | None:
    """Returns the index of this process's worker, or None in other processes."""
    return _index


class _Counted:
    """An iterator of per-worker data that counts its batches.

    Attributes:
        count: the number of batches so far.
        has_ended: whether it had no more, in the present call.
    """

    def __init__(self, iterator: Iterator[Any]) -> None:
        self._iterator = iterator
        self.count, self.has_ended = 0, False

    def __iter__(self) -> _Counted:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._iterator)
        except StopIteration:
            self.has_ended = True
            raise
        self.count += 1
        return batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)


class Worker:
    """A worker, an actor of Ray that :class:`mirrored.parameter_server.strategy.ParameterServerStrategy` creates.

    Args:
        index: from 0.
        workers: the number of workers.
        servers: the servers that store the variables.
        seed: the seed of the chief's random numbers. Each worker's seed differs.
    """

    def __init__(self, index: int, workers: int, servers: Servers, seed: int | None) -> None:
        global _index
        _index = index
        self._strategy = OneDeviceStrategy(seed=None if seed is None else seed + 1 + index)
        self._input = InputContext(workers, index, 1)
        self._replica = Replica(servers, index)
        self._added = 0
        self._made: dict[Reference, Any] = {("strategy", 0): self._strategy, ("coordinator", 0): None}

    def add_variables(self, variables: Sequence[PlacedVariable]) -> None:
        """Creates this worker's copies of variables, without values yet."""
        self._replica.add(variables, [variable.allocate() for variable in variables])

    def add_models(self, pickled: bytes) -> None:
        """Creates this worker's copies of models, the outermost modules."""
        self._replica.watch(unpickle(pickled, self._resolve))

    def add_optimizer(self, pickled: bytes) -> None:
        """Creates this worker's copy of an optimizer."""
        self._replica.adopt(unpickle(pickled, self._resolve))

    def add_pipeline(self, pickled: bytes) -> None:
        """Stores the argument of ``create_per_worker_dataset`` until its data are used."""
        self._made[("pipeline", self._added)] = pickled

    def _resolve(self, reference: Reference) -> Any:
        (kind, index, *_), replica = reference, self._replica
        own: Any = {"module": replica.modules, "variable": replica.tensors, "optimizer": replica.optimizers}
        if kind in own:
            return own[kind][index]
        if kind == "optimizer of library":
            return replica.optimizers[index].own  # type: ignore[attr-defined]
        if reference not in self._made:
            self._made[reference] = self._load_data(index) if kind == "dataset" else self._iterate(index)
        return self._made[reference]

    def _load_data(self, index: int) -> Any:
        make = unpickle(self._made[("pipeline", index)], self._resolve)
        parameters = inspect.signature(make).parameters.values()
        return make(self._input) if any(p.default is p.empty for p in parameters) else make()

    def _iterate(self, index: int) -> Any:
        data = self._resolve(("dataset", index))
        if (iterator := iter(data)) is data:
            del self._made[("dataset", index)]  # it can be used only once: another iterator needs new data
        return _Counted(iterator)

    def _counted(self) -> list[_Counted]:
        return [made for made in self._made.values() if isinstance(made, _Counted)]

    def _why_stopped(self, error: BaseException) -> str:
        ended = [made for made in self._counted() if made.has_ended]
        if isinstance(error, StopIteration) and ended:
            return (
                f"the data of worker {self._input.input_pipeline_id} ended after {ended[-1].count} batches: let "
                "create_per_worker_dataset return data without an end, or schedule fewer functions"
            )
        return f"a scheduled function on worker {self._input.input_pipeline_id} raised {type(error).__name__}"

    def call(self, pickled: bytes, additions: Sequence[ray.ObjectRef[Any]], call: Call) -> bytes:
        """Calls a function.

        Args:
            pickled: the function, its arguments and keyword arguments, and the conditions of the chief.
            additions: the calls of this worker's methods ``add_…`` that must run before.
            call: the number of this call, and that of the first unfinished one.

        Returns:
            The pickled result, with tensors on the CPU.

        Raises:
            Exception: the exception that the function raised. One with a meaning for Python's loops, which would end a
                loop of the chief, is a RuntimeError.
        """
        for method, arguments in ray.get(additions[self._added :]):
            getattr(self, method)(*arguments)
            self._added += 1
        self._replica.begin(call)
        fn, args, kwargs, conditions = unpickle(pickled, self._resolve)
        self._replica.adopt_conditions(conditions)
        for data in self._counted():
            data.has_ended = False
        try:
            result = fn(*args, **kwargs)
            self._replica.rebind()
            self._replica.add_buffers()
        except (StopIteration, StopAsyncIteration, GeneratorExit) as error:
            raise RuntimeError(self._why_stopped(error)) from error
        finally:
            self._replica.settle()
            written = self._replica.take_back()
        if written is not None:
            raise RuntimeError(
                f"a scheduled function wrote to {written} itself, which would stay on this worker: let an optimizer "
                "step it, or write to it on the chief, between two calls of the coordinator"
            )
        return pickle_by_reference(trees.map_leaves(lambda x: x.detach().cpu() if isinstance(x, Tensor) else x, result))
