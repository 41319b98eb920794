"""The strategy for training with parameter servers. It places the variables of the scope on the servers."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

try:
    import ray
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"parameter servers run on Ray: pip install 'ray>=2.59' ({error})") from error
from torch import nn
from torch.optim import Optimizer

from mirrored.cluster.resolver import ClusterResolver
from mirrored.cluster.tf_config import TFConfigClusterResolver, is_evaluator
from mirrored.interceptor import interceptor
from mirrored.parameter_server.layout import join_state, lay_out, split_state
from mirrored.parameter_server.nodes import Cluster
from mirrored.parameter_server.partitioners import Partitioner
from mirrored.parameter_server.replica import TABLES, Call, Replica
from mirrored.parameter_server.servers import (
    ActorLostError,
    Reference,
    Server,
    Servers,
    libraries,
    pickle_by_reference,
    result_of,
    unpickle,
)
from mirrored.parameter_server.worker import Worker
from mirrored.strategy.kinds import OneDeviceStrategy
from towers.sharding.shards import check_elementwise, inner_optimizer
from towers.system.messages import get_logger
from towers.system.timeouts import clock

log = get_logger("mirrored")


@dataclass(frozen=True)
class PerWorkerDataset:
    """The result of ``ClusterCoordinator.create_per_worker_dataset``, or an iterator over it.

    As an argument of a scheduled function, it is the worker's own data or iterator.
    """

    reference: Reference
    iterators: Iterator[int] = field(default_factory=itertools.count)

    def __iter__(self) -> PerWorkerDataset:
        kind, index, *_ = self.reference
        return self if kind == "iterator" else PerWorkerDataset(("iterator", index, next(self.iterators)))

    def __next__(self) -> Any:
        raise RuntimeError("the data are the workers': call next() in a function that is given to schedule()")


class ParameterServerStrategy(OneDeviceStrategy):
    """Stores variables on servers. Workers run the functions that a :class:`ClusterCoordinator` schedules.

    Variables that are created in the scope are placed on the servers when the next function is scheduled: whole, in
    turn, or split along dimension 0. The chief runs the script. It has a copy, which is pulled when it is used. So it
    evaluates and saves as with one device.

    The cluster is described by ``cluster_resolver`` or ``TF_CONFIG``. Its tasks ``worker`` and ``ps`` also run this
    script, and leave it here (:mod:`mirrored.parameter_server.nodes`). An ``evaluator`` has one device and no servers.
    Without such a description, workers and servers are started in the Ray cluster of ``RAY_ADDRESS``, or on this
    machine.

    Args:
        variable_partitioner: splits parameters. Default: no parameter is split.
        workers, servers: the numbers of workers and servers. Default: those of the cluster's tasks; without tasks, 2
            and 1.
        replicas_to_aggregate: the number of gradients whose mean is used in a step, as in TensorFlow 1's
            ``SyncReplicasOptimizer``. Default: each gradient is a step, on arrival.
        staleness: with ``replicas_to_aggregate``, the maximum age, in steps, of the parameters of a gradient. Older
            gradients are dropped.
        seed: see :class:`MirroredStrategy`. Each worker has another seed.
        startup_timeout_seconds: how long tasks wait for each other at the start.

    Attributes:
        replica: the chief's copies of the variables.
        takes_turns: whether each step needs a gradient of every worker with the same parameters.

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
        interceptor().asynchronous(type(self).__name__)
        resolver = cluster_resolver or TFConfigClusterResolver()
        super().__init__(seed=seed)
        self.cluster_resolver = resolver
        if is_evaluator(self):
            workers = servers = 0
        else:
            workers, servers = _count("worker", workers, resolver, 2), _count("ps", servers, resolver, 1)
            if replicas_to_aggregate is not None and not 1 <= replicas_to_aggregate <= workers:
                raise ValueError(f"replicas_to_aggregate is {replicas_to_aggregate}, but must be from 1 to {workers}")
            if staleness < 0:
                raise ValueError(f"staleness is {staleness}, but must be 0 or more steps")
            self._cluster = Cluster(resolver, workers + servers, startup_timeout_seconds)
        self.workers = workers
        self.takes_turns = replicas_to_aggregate == workers and staleness == 0
        self.coordinator: Callable[[], Any] = lambda: None  # a weak reference
        self.numbers_of_calls = itertools.count()
        self.events.saving.append(functools.partial(_finish_calls, weakref.ref(self)))
        turn = itertools.cycle(range(servers))
        self._lay_out = functools.partial(lay_out, turn=turn, partitioner=variable_partitioner)
        self._roots: list[nn.Module] = []
        self._additions: list[Any] = []  # Ray's references to objects that workers need before the next call
        rule = () if replicas_to_aggregate is None else (replicas_to_aggregate, staleness)
        self._servers = Servers([self._cluster.start(Server, f"ps:{i}", i, *rule) for i in range(servers)])
        self._workers = [self._start_worker(index) for index in range(workers)]
        self.replica = Replica(self._servers)
        if workers:
            self._servers.ask_all("__ray_ready__")
            ray.get([worker.__ray_ready__.remote() for worker in self._workers])
            log.info("%d workers and %d servers, started by %s", workers, servers, self._cluster.origin)

    def _start_worker(self, index: int) -> Any:
        return self._cluster.start(Worker, f"worker:{index}", index, self.workers, self._servers, self._seed)

    def await_worker(self, index: int) -> None:
        """Waits until a worker is ready, and restarts it if it was lost. Its task may have to be started first."""
        while True:
            try:
                result_of(self._workers[index].__ray_ready__.remote(), f"worker {index}")
                return
            except ActorLostError:
                self._workers[index] = self._start_worker(index)
                clock.sleep(1)

    # -- what the coordinator asks for -------------------------------------------------------------------

    def prepare(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
        """Places new variables, and returns a pickled function with its arguments for a worker.

        Raises:
            TypeError: an object in it cannot be pickled.
        """
        self._place()
        if _with_forward(module for root in self._roots for module in root.modules()) != _with_forward(
            self.replica.modules
        ):
            raise RuntimeError("a model has got other modules since the first schedule(): make them before it")
        try:
            return pickle_by_reference((fn, args, kwargs, self.replica.conditions()), self._reference_of)
        except TypeError as error:
            raise TypeError(
                f"{fn!r} cannot be sent to the workers with all objects that it refers to: {error}. Objects "
                "created in the scope are sent as references; create data with create_per_worker_dataset"
            ) from None

    def call(self, index: int, pickled: bytes, call: Call, meanwhile: Callable[[], None]) -> Any:
        """Calls a function on a worker, and returns its result, with tensors on the CPU.

        Args:
            call: its number, and that of the first unfinished call.
            meanwhile: is called every second.

        Raises:
            ActorLostError: the worker was lost; :meth:`await_worker` starts another one instead.
            BaseException: the exception that the function raised.
        """
        try:
            result = self._workers[index].call.remote(pickled, self._additions, call)
            while not ray.wait([result], timeout=1.0)[0]:
                meanwhile()
            return unpickle(result_of(result, f"a scheduled function on worker {index}"))
        finally:
            self.replica.expire()

    def add_pipeline(self, dataset_fn: Any) -> PerWorkerDataset:
        """Adds data for each worker; see ``ClusterCoordinator.create_per_worker_dataset``."""
        self._place()
        make = dataset_fn if callable(dataset_fn) else lambda: dataset_fn
        self._add("add_pipeline", pickle_by_reference(make, self._reference_of))
        return PerWorkerDataset(("dataset", len(self._additions) - 1))

    def flush(self, waiting: int = 0) -> None:
        """Makes servers step with the gradients that they have, if ``waiting`` workers wait for others.

        It has an effect only in synchronous training.
        """
        self._servers.ask_all("flush", waiting)
        self.replica.expire()

    # -- placing what the scope has made -----------------------------------------------------------------

    def _place(self) -> None:
        """Places new variables, and assigns the values that the script has written.

        Raises:
            RuntimeError: this is the evaluator.
            Exception: an object cannot be placed. Every call raises it until the object is removed.
        """
        if not self.workers:
            raise RuntimeError("this is the evaluator, which has no workers: ask mirrored.evaluation.is_evaluator")
        replica = self.replica
        self.engine.mirror_pending()
        roots = {root: name for name, root in self.engine.recorder.roots() if id(root) not in replica.references}
        names = {
            tensor: f"{name}.{path}"
            for root, name in roots.items()
            for path, tensor in (*root.named_parameters(), *root.named_buffers())
            if id(tensor) not in replica.references
        }
        buffers = {id(p) for root in roots for library in libraries for p in library.written_by_forward(root)}
        variables = self._lay_out(names, len(replica.tensors), _tables(roots), buffers)
        replica.add(variables, names)
        replica.rebind()
        replica.assign(replica.written())
        if roots:
            self._add("add_variables", variables)
            self._add("add_models", pickle_by_reference([*roots], self._reference_of))
            replica.watch(roots)
            self._roots += roots

    def _add(self, method: str, *arguments: Any) -> None:
        """Makes every worker call one of its methods before the next function."""
        self._additions.append(ray.put((method, arguments)))

    def _reference_of(self, obj: Any) -> Reference | None:
        if isinstance(obj, Optimizer):
            return ("optimizer", self._index_of(obj))
        if isinstance(obj, PerWorkerDataset):
            return obj.reference
        if obj is not None and obj is self.coordinator():
            return ("coordinator", 0)
        for library in libraries:
            if (optimizer := library.optimizer_of(obj)) is not None:
                return ("optimizer of library", self._index_of(optimizer))
        return ("strategy", 0) if obj is self else self.replica.references.get(id(obj))

    # -- optimizers --------------------------------------------------------------------------------------

    def _index_of(self, optimizer: Optimizer) -> int:
        """Returns the index of an optimizer. A new optimizer is first created on the servers."""
        if optimizer in (optimizers := self.replica.optimizers):
            return optimizers.index(optimizer)
        index = len(optimizers)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if not all(map(self.replica.parts_of, parameters)):
            raise TypeError(f"{type(optimizer).__name__} steps parameters that were not made in the strategy's scope")
        if any(len(self.replica.parts_of(p)) > 1 for p in parameters):
            check_elementwise(optimizer, "variable_partitioner", "leave it out")
        stateless = inner_optimizer(optimizer)
        stateless.param_groups = optimizer.param_groups
        pickled = pickle_by_reference(stateless, lambda obj: None if obj is stateless else self._reference_of(obj))
        self._servers.ask_all("install", index, pickled)
        self.replica.adopt(optimizer)
        self._add("add_optimizer", pickled)
        self._set_state(index, optimizer)
        optimizer.register_state_dict_pre_hook(functools.partial(self._get_state, index))
        optimizer.register_load_state_dict_post_hook(functools.partial(self._set_state, index))
        return index

    def _get_state(self, index: int, optimizer: Optimizer) -> None:
        state = ChainMap(*self._servers.ask_all("state", index).values())
        for parameter, variable in zip(self.replica.tensors, self.replica.variables, strict=True):
            if there := [(part, state[part]) for part in variable.parts if part in state]:
                optimizer.state[parameter] = join_state(there, parameter)

    def send_state(self, optimizer: Optimizer) -> bool:
        """Gives the servers the state of an optimizer that was written to on the chief, if they have the optimizer.

        Returns:
            Whether they have it.
        """
        has_it = optimizer in self.replica.optimizers
        if has_it:
            self._set_state(self.replica.optimizers.index(optimizer), optimizer)
        return has_it

    def _set_state(self, index: int, optimizer: Optimizer) -> None:
        state = {
            part: split_state(entry, parameter, part)
            for parameter, entry in optimizer.state.items()
            for part in self.replica.parts_of(parameter)
        }
        self._servers.ask("set_state", state, index, to_all=True)


def _finish_calls(reference: weakref.ref[ParameterServerStrategy], name: str) -> None:
    """Waits for the scheduled functions, so a checkpoint contains all of their steps or none."""
    if (strategy := reference()) is not None and (coordinator := strategy.coordinator()) is not None:
        coordinator.join()


def _count(job: str, wanted: int | None, resolver: ClusterResolver, default: int) -> int:
    """Returns the number of workers or servers."""
    tasks = resolver.cluster_spec()
    there = len(tasks.get(job, [])) if tasks else default
    if wanted is not None and wanted < 1:
        raise ValueError(f"{wanted} {job} was asked for, but there has to be one at least")
    if tasks and wanted not in (None, there):
        raise ValueError(f"{wanted} {job} were asked for, but {resolver.origin} has {there}: leave the number out")
    return wanted or there


def _with_forward(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """Returns the modules without dicts of parameters, which each ``fit`` of Keras makes again."""
    return [module for module in modules if not isinstance(module, nn.ParameterDict)]


def _tables(models: Iterable[nn.Module]) -> set[int]:
    """Returns the ids of the weights that only embeddings with ``sparse=True`` use."""
    layers = [layer for model in models for layer in model.modules()]
    sparse = [layer for layer in layers if isinstance(layer, TABLES) and layer.sparse]
    for layer in sparse:
        if layer.max_norm is not None:
            raise ValueError(f"{layer} writes to its weight in each forward: max_norm is not possible on servers")
    others = {id(p) for layer in layers if layer not in sparse for p in layer.parameters(recurse=False)}
    return {id(layer.weight) for layer in sparse} - others
