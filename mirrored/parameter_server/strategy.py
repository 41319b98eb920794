"""The strategy of a training with parameter servers: what the scope makes is placed on them."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

try:
    import ray
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"parameter servers run on Ray: pip install 'ray>=2.59' ({error})") from error
from torch import Tensor, nn
from torch.optim import Optimizer

from mirrored.cluster.resolver import ClusterResolver
from mirrored.cluster.tf_config import TFConfigClusterResolver
from mirrored.evaluation.evaluator import is_evaluator
from mirrored.parameter_server import references
from mirrored.parameter_server.layout import join_state, lay_out, split_state
from mirrored.parameter_server.nodes import Cluster
from mirrored.parameter_server.partitioners import Partitioner
from mirrored.parameter_server.references import Reference
from mirrored.parameter_server.replica import TABLES, Conditions, Replica
from mirrored.parameter_server.server import Server, StepRule
from mirrored.parameter_server.servers import ActorLostError, Servers, result_of
from mirrored.parameter_server.worker import Worker
from mirrored.strategy.base import Strategy
from mirrored.strategy.kinds import OneDeviceStrategy
from mirrored.strategy.scope import Recorder
from towers.sharding.inner import check_elementwise, inner_optimizer
from towers.system.log import get_logger
from towers.system.timeouts import clock

log = get_logger("mirrored")


@dataclass(frozen=True)
class PerWorkerDataset:
    """What ``ClusterCoordinator.create_per_worker_dataset`` returns, or an iterator over it.

    Given to ``schedule``, it is the worker's own there.
    """

    reference: Reference
    iterators: Iterator[int] = field(default_factory=itertools.count)

    def __iter__(self) -> PerWorkerDataset:
        kind, index, *_ = self.reference
        return self if kind == "iterator" else PerWorkerDataset(("iterator", index, next(self.iterators)))

    def __next__(self) -> Any:
        raise RuntimeError("the data are the workers': call next() in a function that is given to schedule()")


class ParameterServerStrategy(OneDeviceStrategy):
    """Variables live on servers, and workers compute the functions that a :class:`ClusterCoordinator` schedules.

    What is made in the scope is placed on the servers, whole in turn or cut along dimension 0. The chief, which runs
    the script, has a copy, which is pulled when it is used: it evaluates and saves as with one device.

    The cluster comes from ``cluster_resolver``, else ``TF_CONFIG``: its tasks ``worker`` and ``ps`` run this script,
    too, and leave it here (:mod:`mirrored.parameter_server.nodes`); an ``evaluator`` has one device and no servers.
    Else workers and servers are started in the Ray cluster that ``RAY_ADDRESS`` names, else on this machine.

    Args:
        variable_partitioner: cuts parameters; default: none is cut.
        workers, servers: how many of each; default: as many as the cluster has tasks, else 2 and 1.
        replicas_to_aggregate: step with the mean of so many gradients, as TensorFlow 1's ``SyncReplicasOptimizer``;
            default: with each gradient as it comes.
        staleness: then, how many steps old the parameters of a gradient may be; older gradients are dropped.
        seed: see :class:`MirroredStrategy`. Workers have others.
        startup_timeout_seconds: how long tasks wait for each other at the start.

    Raises:
        ValueError: a number is out of its range.
        ClusterError, StartupError: see :class:`mirrored.parameter_server.nodes.Cluster`.
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        variable_partitioner: Partitioner | None = None,
        *,
        workers: int | None = None,
        servers: int | None = None,
        replicas_to_aggregate: int | None = None,
        staleness: int = 0,
        seed: int | None = None,
        startup_timeout_seconds: float = 300.0,
    ) -> None:
        resolver = cluster_resolver or TFConfigClusterResolver()
        super().__init__(seed=seed)
        self.cluster_resolver = resolver
        if is_evaluator(self):
            workers = servers = 0
        else:
            workers, servers = _count("worker", workers, resolver, 2), _count("ps", servers, resolver, 1)
            if replicas_to_aggregate is not None and not 1 <= replicas_to_aggregate <= workers:
                raise ValueError(
                    f"replicas_to_aggregate is {replicas_to_aggregate}, but must be from 1 to {workers} workers"
                )
            self._cluster = Cluster(resolver, workers + servers, startup_timeout_seconds)
        self.workers = workers
        self.coordinator: Callable[[], Any] = lambda: None  # a weak reference
        self._partitioner = variable_partitioner
        self._turn = itertools.cycle(range(servers))
        self._rule = StepRule() if replicas_to_aggregate is None else StepRule(replicas_to_aggregate, staleness)
        self._recorder = Recorder()
        self._roots: list[nn.Module] = []
        self._failed: Exception | None = None
        self._additions: list[tuple[str, tuple[Any, ...]]] = []  # what workers are sent, before the next call
        self._added = [0] * workers
        self._servers = Servers([self._cluster.start(Server, f"ps:{i}", i, self._rule) for i in range(servers)])
        self._workers = [self._start_worker(index) for index in range(workers)]
        self._replica = Replica(self._servers, publishes=True)
        if workers:
            self._servers.ask_all("__ray_ready__")
            ray.get([worker.__ray_ready__.remote() for worker in self._workers])
            log.info("%d workers and %d servers, started by %s", workers, servers, self._cluster.origin)

    def _start_worker(self, index: int) -> Any:
        self._added[index] = 0
        return self._cluster.start(Worker, f"worker:{index}", index, self.workers, self._servers, self._seed)

    def await_worker(self, index: int) -> None:
        """Wait until a worker is there, again if it was lost; its task may have to be started first."""
        while True:
            try:
                result_of(self._workers[index].__ray_ready__.remote(), f"worker {index}")
                return
            except ActorLostError:
                self._workers[index] = self._start_worker(index)
                clock.sleep(1)

    @contextlib.contextmanager
    def scope(self, *, sync_batch_norm: bool = False) -> Iterator[Strategy]:
        """Record what is created inside: it is placed on the servers when the next function is scheduled."""
        with super().scope(sync_batch_norm=sync_batch_norm):
            self._recorder.start()
            try:
                yield self
            finally:
                self._recorder.stop()

    # -- what the coordinator asks for -------------------------------------------------------------------

    def prepare(self, call: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]) -> tuple[bytes, Conditions]:
        """A function and its arguments as workers are sent them; what they need for it is placed before.

        Raises:
            TypeError: something in it cannot be pickled.
            RuntimeError: this is the evaluator.
        """
        if not self.workers:
            raise RuntimeError("this is the evaluator, which has no workers: ask mirrored.evaluation.is_evaluator")
        self._place()
        if [module for root in self._roots for module in root.modules()] != self._replica.modules:
            raise RuntimeError(
                "a model has got other modules since it was placed: make them before the first schedule()"
            )
        try:
            pickled = references.dump(call, self._reference_of)
        except TypeError as error:
            raise TypeError(
                f"{call[0]!r} cannot be sent to the workers with all that it refers to: {error}. What the scope has "
                "made is sent as a reference; data come from create_per_worker_dataset"
            ) from None
        self._replica.assign(self._replica.written())
        return pickled, self._replica.conditions()

    def call(self, index: int, pickled: bytes, conditions: Conditions) -> Any:
        """Let a worker call a function; returns what the function does, with tensors on the CPU.

        Raises:
            ActorLostError: the worker was lost; :meth:`await_worker` starts another one in its place.
            NotYet: the worker has to wait for others before it may begin.
            BaseException: what the function has raised.
        """
        worker, raiser = self._workers[index], f"a scheduled function on worker {index}"
        try:
            while self._added[index] < len(self._additions):
                method, arguments = self._additions[self._added[index]]
                result_of(getattr(worker, method).remote(*arguments), raiser)
                self._added[index] += 1
            return references.load(result_of(worker.call.remote(pickled, conditions), raiser))
        finally:
            self._replica.expire()

    def add_pipeline(self, dataset_fn: Any) -> PerWorkerDataset:
        """See ``ClusterCoordinator.create_per_worker_dataset``."""
        self._place()
        count = sum(method == "add_pipeline" for method, _ in self._additions)
        self._additions.append(("add_pipeline", (references.dump(dataset_fn, self._reference_of),)))
        return PerWorkerDataset(("dataset", count))

    def flush(self) -> None:
        """Synchronous training: let servers step with what they have, though it is fewer gradients."""
        self._servers.ask_all("flush")
        self._replica.expire()

    def refresh(self) -> None:
        """Pull what has changed to the chief."""
        self._replica.refresh()

    # -- placing what the scope has made -----------------------------------------------------------------

    def _place(self) -> None:
        """Place what is new.

        Raises:
            Exception: it cannot be placed; once that was so, always.
        """
        if self._failed is not None:
            raise self._failed
        if not self._recorder.pending:
            return
        try:
            self._place_new()
        except Exception as error:
            self._failed = error
            raise

    def _place_new(self) -> None:
        named, lazy = self._recorder.take()
        if lazy:
            raise RuntimeError(
                f"{type(lazy[0]).__name__} has no shapes yet: call it in the scope, or before the first schedule()"
            )
        known = {id(module) for module in self._replica.modules}
        roots = [root for _, root in self._recorder.roots() if id(root) not in known]
        first = len(self._replica.tensors)
        variables = lay_out(named, first, _tables(roots), self._turn, self._partitioner)
        self._replica.add(variables, [entry.tensor for entry in named], roots)
        self._replica.assign(range(first, len(self._replica.tensors)))
        pickled = references.dump(roots, self._describe)
        self._roots += roots
        self._additions.append(("add_models", (ray.put(pickled), variables)))

    def _describe(self, obj: Any) -> Reference | None:
        """In a model that is sent, variables are what they are made of."""
        if isinstance(obj, Tensor) and (index := self._replica.index.get(id(obj))) is not None:
            kind = self._replica.variables[index].kind
            return ("variable", index, kind, tuple(obj.shape), obj.stride(), obj.dtype, obj.requires_grad)
        return None

    def _reference_of(self, obj: Any) -> Reference | None:
        if isinstance(obj, nn.Module):
            return next((("module", i) for i, module in enumerate(self._replica.modules) if module is obj), None)
        if isinstance(obj, Tensor):
            return ("variable", self._replica.index[id(obj)]) if self._replica.knows(obj) else None
        if isinstance(obj, Optimizer):
            return ("optimizer", self._index_of(obj))
        if isinstance(obj, PerWorkerDataset):
            return obj.reference
        if obj is not None and obj is self.coordinator():
            return ("coordinator", 0)
        return ("strategy", 0) if obj is self else None

    # -- optimizers --------------------------------------------------------------------------------------

    def _index_of(self, optimizer: Optimizer) -> int:
        """The index of an optimizer; one that is met for the first time is made on the servers."""
        optimizers = self._replica.optimizers
        for index, known in enumerate(optimizers):
            if known is optimizer:
                return index
        index = len(optimizers)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not all(self._replica.knows(p) for p in parameters):
            raise TypeError(f"{type(optimizer).__name__} steps parameters that were not made in the strategy's scope")
        parts = [part for p in parameters for part in self._replica.parts_of(p)]
        if any(part.end for part in parts):
            check_elementwise(optimizer, "variable_partitioner", "leave it out")
        stateless = inner_optimizer(optimizer)
        stateless.param_groups = optimizer.param_groups
        pickled = references.dump(stateless, lambda obj: None if obj is stateless else self._reference_of(obj))
        self._servers.ask_all("install", index, pickled, parts)
        self._replica.adopt(optimizer)
        self._additions.append(("add_optimizer", (pickled,)))
        if optimizer.state:
            self._set_state(index, optimizer)
        optimizer.register_state_dict_pre_hook(functools.partial(self._get_state, index))
        optimizer.register_load_state_dict_post_hook(functools.partial(self._set_state, index))
        return index

    def _get_state(self, index: int, optimizer: Optimizer) -> None:
        state = {
            part: entry for answer in self._servers.ask_all("state", index).values() for part, entry in answer.items()
        }
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                there = [(part, state[part]) for part in self._replica.parts_of(parameter) if part in state]
                if there:
                    optimizer.state[parameter] = join_state(there, parameter)

    def _set_state(self, index: int, optimizer: Optimizer) -> None:
        state = {
            part: split_state(entry, parameter, part)
            for parameter, entry in optimizer.state.items()
            for part in self._replica.parts_of(parameter)
        }
        self._servers.ask("set_state", state, index, to_all=True)


def _count(job: str, wanted: int | None, resolver: ClusterResolver, default: int) -> int:
    """How many workers or servers there are to be."""
    tasks = resolver.cluster_spec()
    there = len(tasks.get(job, [])) if tasks else default
    count = there if wanted is None else wanted
    if count < 1:
        raise ValueError(f"{count} {job} was asked for, but there has to be one at least")
    if tasks and count != there:
        raise ValueError(f"{count} {job} were asked for, but {resolver.origin} has {there}: leave the number out")
    return count


def _tables(models: Sequence[nn.Module]) -> set[int]:
    """The ids of the weights that nothing but embeddings with ``sparse=True`` has."""
    layers = [layer for model in models for layer in model.modules()]
    sparse = [layer for layer in layers if isinstance(layer, TABLES) and layer.sparse]
    for layer in sparse:
        if layer.max_norm is not None:
            raise ValueError(f"{layer} writes to its weight in each forward: max_norm is not possible on servers")
    others = {id(p) for layer in layers if layer not in sparse for p in layer.parameters(recurse=False)}
    return {id(layer.weight) for layer in sparse} - others
