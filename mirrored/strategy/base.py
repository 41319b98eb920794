"""The base class of strategies: one model on several towers, with the losses, gradients and weights of one device."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mirrored.cluster.resolver import ClusterResolver
from mirrored.context import ReduceOp, ReplicaContext, frame, note_towers_of, operation_name, refuse_inside_run
from mirrored.data.dataset import DistributedDataset
from mirrored.data.distribute import InputContext, ValueContext, distribute
from mirrored.events import Events, show_in_traces
from mirrored.interceptor import interceptor
from mirrored.seeds import TowerStreams
from mirrored.shares import Distribution, KnownShares, cut_for
from mirrored.strategy.calls import RunKinds, check_arguments, refuse_what_runs_later
from mirrored.strategy.engine import Engine, TrainingOptions
from mirrored.strategy.gradients import Gradients
from towers.collectives import values
from towers.collectives.agreement import agree, announce
from towers.collectives.communicator import Communicator
from towers.launching.console import print_while_terminal_lasts
from towers.options import CommunicationOptions, instead_of
from towers.system.messages import get_logger
from towers.system.profiling import range_
from towers.topology import Topology

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    from mirrored.data.batch_dims import Dims
    from mirrored.monitor.tracing import Trace
    from mirrored.variables import Variable

log = get_logger("mirrored")

_TRACED_STEPS = "MIRRORED_TRACE"
"""Environment variable with the steps that ``mirrored trace`` records, and the file: ``10:13:/home/me/trace.json``."""


class Strategy(Gradients):
    """Base class of all strategies. Construct one of its subclasses.

    Every tower is a process that runs the whole script with its own strategy. A "per-replica value" is therefore the
    tower's own value. All towers must call every method, in the same order.

    Attributes:
        num_replicas_in_sync: the number of towers that train together.
        device: this tower's device.
        is_chief: whether this is tower 0, which writes and prints.
        virtual_towers: the number of virtual towers, or None.
        cluster_resolver: the source of the cluster's description.
        topology: this tower's position among the towers.
        communicator: collectives over all towers.
        health: this tower's position, for failure reports: ``step``, the training step as checkpoints count it, and a
            phase. ``with strategy.health.during("writing the report"):`` adds a phase of the script.
        events: the moments of a training, to which a script may add listeners (:mod:`mirrored.events`).
        streams: this tower's random numbers.
        engine: the features that are attached to models and optimizers.
    """

    def __init__(
        self,
        topology: Topology,
        communicator: Communicator,
        resolver: ClusterResolver | None,
        options: CommunicationOptions,
        seed: int | None,
        training: TrainingOptions,
    ) -> None:
        super().__init__()
        self.topology = topology
        self.communicator = communicator
        self.health = communicator.health
        self.cluster_resolver = resolver
        self.device = communicator.device
        self.num_replicas_in_sync = topology.size
        self.is_chief = topology.is_chief
        self.known_shares = KnownShares()
        self._seed = seed
        self._several = topology.size > 1
        cut = cut_for(topology.size, topology.index, training.virtual_towers)
        self.virtual_towers = cut.parts if cut.virtual else None
        self.events = Events(self.health)
        self._distribution = Distribution(communicator, cut, self.known_shares, self.events)
        self.accumulates = False
        self._logged: set[str] = set()
        if self._several:
            settings = {**vars(training), "synchronize": repr(training.synchronize), "seed": seed}
            agree(communicator, "the strategy", settings)
        self.streams = TowerStreams(communicator, seed, virtual=cut.virtual, compared=interceptor().compares)
        show_in_traces(self.events)
        kinds = RunKinds(self.events, self.health)
        self.engine = Engine(self._distribution, options, training)
        guarded = self._several or self.engine.virtual is not None or self.engine.local is not None
        kinds.attach(self.engine, alone=not guarded)
        if self._several:
            note_towers_of(self)
        self._trace_on_request()

    # -- creating the model ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def scope(self, *, sync_batch_norm: bool = False) -> Iterator[Strategy]:
        """Mirrors the parameters and buffers of modules that are created inside, on this tower's device.

        The scope is re-entrant. The first ``run`` after it compares names, shapes, dtypes and order, broadcasts the
        values from tower 0, and attaches gradient averaging. A copy of a whole model (``copy.deepcopy``) and a loaded
        model were not created inside: pass them to :meth:`mirror`.

        Args:
            sync_batch_norm: whether BatchNorm layers that are created inside, or in a nested scope, normalise over the
                global batch during training. They then need the forward and backward of every tower; see
                :mod:`mirrored.attached.batch_norm`. By default they normalise over this tower's share. A custom forward
                that computes the statistics itself is a RuntimeError during training.

        Raises:
            RuntimeError: inside another strategy's scope or run, or inside ``run``.
            ValueError: ``sync_batch_norm`` with virtual towers.
        """
        self._check_here("scope()")
        refuse_inside_run("scope()", "create the model outside")
        on_device = torch.device(self.device) if self.device.type != "cpu" else contextlib.nullcontext()
        with self.engine.recording(sync_batch_norm), frame(self, None), on_device:
            yield self

    def mirror(self, module: nn.Module, *, sync_batch_norm: bool = False) -> nn.Module:
        """Mirrors a module that was created outside the scope (loaded or copied), and returns it.

        It is moved to this tower's device at once, as by ``module.to``. The towers are mirrored on the next ``run``.
        Metrics of torchmetrics in the module then count every example once, even if a tower's share is empty
        (:mod:`mirrored.attached.metrics`).

        Args:
            sync_batch_norm: see :meth:`scope`; takes effect at once. A forward method that was assigned to a BatchNorm
                object is a TypeError.

        Raises:
            TypeError: ``module`` is not a module.
        """
        self._check_here("mirror()")
        refuse_inside_run("mirror()", "mirror a model before the run that trains it")
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"strategy.mirror was given a value of type {type(module).__name__}; give it a torch module, such as a "
                "model or a metric of torchmetrics. Metrics of Keras work in model.compile only"
            )
        devices = {tensor.device for tensor in itertools.chain(module.parameters(), module.buffers())}
        if devices != {self.device}:  # a metric has none; in a quantised model, even an unnecessary `to` is an error
            module.to(self.device)
        self.engine.add(module, sync_batch_norm)
        return module

    def shard(
        self,
        model: nn.Module,
        units: Sequence[type[nn.Module] | str] | None = None,
        *,
        reshard_after_forward: bool | None = None,
        mixed_precision: MixedPrecisionPolicy | None = None,
        replicate_across_hosts: bool = True,
    ) -> nn.Module:
        """Shards the parameters, gradients and optimizer states of a model over the towers, by torch's ``fully_shard``.

        Use it for models that do not fit a device. Call it on all towers, before the optimizer is created. Training
        steps do not change. Layers on the ``meta`` device receive memory and first values here, by
        ``reset_parameters`` or ``_init_weights`` of a model of Hugging Face. On one tower, the model is only mirrored.

        Args:
            units: classes of modules, or their names, such as ``[Block]``. A tower holds one unit at a time as a whole,
                and the parameters that are in no unit. Default: the classes that a model of Hugging Face names, except
                those that share a weight with other parts, or none.
            reshard_after_forward: whether the parameters of a unit are freed after forward, and gathered again in
                backward. Default: torch's, True except for the outermost module.
            mixed_precision: the dtypes of the computation, of ``torch.distributed.fsdp``.
            replicate_across_hosts: whether each host holds all shards, if all hosts have the same number of towers.
                Otherwise, there is one shard for each tower.

        Returns:
            The model.

        Raises:
            ValueError: a unit matches no module, has parameters of several dtypes, or shares a weight with another
                unit; the model is sharded already; a tensor on ``meta`` receives no values; or the strategy has an
                option that does not support it.
            MirrorError: the model is mirrored already; or, on all towers, the towers' models differ.
        """
        from mirrored import fully_sharded

        self._check_here("shard()")
        refuse_inside_run("shard()", "shard a model before the run that trains it")
        if not isinstance(model, nn.Module):
            raise TypeError(f"strategy.shard was given a value of type {type(model).__name__}; give it a torch module")
        fully_sharded.shard(self, model, units, reshard_after_forward, mixed_precision, replicate_across_hosts)
        return model

    def is_mirrored(self, parameter: torch.Tensor) -> bool:
        """Returns whether ``parameter`` is kept equal on all towers. On one tower without virtual ones: always True."""
        return not (self._several or self.engine.virtual is not None) or self.engine.recorder.is_mirrored(parameter)

    # -- running -----------------------------------------------------------------------------------------

    @instead_of(options="strategy.run(step, args=(x, y)) needs none")
    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Calls ``fn(*args, **kwargs)`` as this tower's replica, and returns its result.

        Inside, ``backward()`` averages gradients over the towers, losses are divided by the size of the global batch of
        ``args``, and random numbers are this tower's own. Exceptions pass through unchanged. If this tower's share has
        no examples, the message of a built-in exception also contains this fact and the remedy.

        Raises:
            TypeError: ``args`` is not a tuple or list, or ``kwargs`` is not a mapping; or ``fn`` returns a generator or
                coroutine, whose body would run outside ``run``.
            MirrorError: on the first use, if the towers' models differ; later, if a mirror check finds different
                parameters, optimizer state or optimizer settings.
            RuntimeError: inside another strategy's scope or run, or while another thread is inside ``run``.
            ForkedError: in a process that was forked from a tower.
        """
        self._check_here("run()")
        check_arguments(fn, args, kwargs)
        outer, replica = self._begin_run(), ReplicaContext(self, (args, kwargs))
        try:
            self.events.begin_run(fn)
            called = interceptor().running(replica, fn)
            if self._several and self.known_shares.holds_stand_in(replica.arguments):
                called = self.engine.keeping_statistics(called)
            with frame(self, replica), self.streams.inside():
                result = called(*args, **(kwargs or {}))
            refuse_what_runs_later(called, result)
        except BaseException as error:
            self._explain(error, replica)
            self.events.failed(error)
            raise
        finally:
            self._runs_in = outer
        self.events.end_run()
        if outer is None and not (self.health.evaluates or self.health.counted_by_script):
            self.events.end_step()
        return result

    def _explain(self, error: BaseException, replica: ReplicaContext) -> None:
        """Adds to an exception of a run that the share has no examples, or only one, if that may be the cause."""
        if self._several and isinstance(error, Exception):
            from mirrored.empty_shares import explain_share

            explain_share(error, self.topology.index, self.known_shares.at_hand(replica.arguments))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates gradients on each tower without averaging. The next backward outside averages their sum."""
        self._check_here("no_sync()")
        before, self.accumulates = self.accumulates, True
        try:
            with self.engine.accumulating():
                yield
        finally:
            self.accumulates = before

    def barrier(self) -> None:
        """Returns when all towers have called it. On GPUs the hosts wait for each other, not for the GPUs.

        Raises:
            DisagreementError: on all towers, if some make another call.
        """
        self._check_here("barrier()")
        if self._several:
            with range_("mirrored::barrier"):
                announce(self.communicator, "strategy.barrier()")

    def check_mirrored(self) -> None:
        """Checks that all towers have the same parameters, optimizer state and optimizer settings, bit for bit.

        All towers must call it. A buffer that differs is one warning, except running statistics of normalisations. It
        does not compare optimizer state with ``shard_optimizer=True``. On one tower it does nothing. It waits for the
        GPU.

        Raises:
            MirrorError: on all towers, with one message that names the difference and the towers that differ.
            DisagreementError: on all towers, if some make another call.
        """
        self._check_here("check_mirrored()")
        refuse_inside_run("check_mirrored()")
        self.events.check("check_mirrored()")

    def state_dict(self) -> dict[str, int]:
        """Returns the seed, and the number of backward passes if later random numbers or compression depend on it."""
        counter = self.engine.counter
        return {"seed": self.streams.seed, "backwards": counter.step if counter is not None else 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continues from the state of a :meth:`state_dict`, on any number of towers. All towers load the same state.

        Raises:
            ValueError: ``state`` is not such a state.
        """
        for key in ("seed", "backwards"):
            number = state.get(key)
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise ValueError(f"state of a strategy: {key} is {number!r}, but must be a whole number from 0")
        self.streams.seed = state["seed"]
        if self.engine.counter is not None:
            self.engine.counter.step = state["backwards"]

    # -- values ------------------------------------------------------------------------------------------

    def variable(self, value: Any, synchronization: str = "auto", aggregation: str = "none", **other: Any) -> Variable:
        """Creates a :class:`mirrored.variables.Variable`, which towers write. ``other``: its ``dtype`` and ``name``."""
        from mirrored.variables import Variable

        return Variable(self, self._check_here, value, synchronization, aggregation, **other)

    @instead_of(reduce_op='reduce("sum", value)', options="leave it out")
    def reduce(self, op: str | ReduceOp, value: Any, axis: int | tuple[int, ...] | None = None) -> Any:
        """Reduces a value over all towers. Every tower receives the result.

        Args:
            op: "sum", "mean", "min", "max", "prod" or :class:`ReduceOp`, in any case.
            value: nested tensors, numpy arrays or numbers.
            axis: None reduces over towers only. An int or tuple also reduces these dimensions, whose sizes may differ
                between towers; "mean" then divides by the number of elements on all towers together.

        Returns:
            The structure of ``value``. Sums and products of integers are int64, means of integers are floating point.

        Raises:
            DisagreementError, ValueError, TypeError: on all towers.
        """
        self._check_here("reduce()")
        with range_("mirrored::reduce"):
            calls = self.engine.repeated_calls
            result = values.reduce(self.communicator, operation_name(op), value, axis, calls=calls)
        interceptor().returned(f"strategy.reduce({operation_name(op)!r})", result)
        return result

    def gather(self, value: Any, axis: int = 0) -> Any:
        """Concatenates the towers' values along ``axis``, in tower order. Every tower receives the result.

        Args:
            value: nested tensors or arrays with at least one dimension. Only the size of ``axis`` may differ.

        Raises:
            DisagreementError, ValueError, TypeError: on all towers. A scalar is a ValueError.
        """
        self._check_here("gather()")
        with range_("mirrored::gather"):
            result = values.gather(self.communicator, value, axis)
        interceptor().returned("strategy.gather()", result)
        return result

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns the values of this process's towers, which is always one."""
        return (value,)

    experimental_local_results = local_results

    @instead_of(value_fn="fn=")
    def distribute_values_from_function(self, fn: Callable[[ValueContext], Any]) -> Any:
        """Returns ``fn(ValueContext)`` of this tower."""
        return fn(ValueContext(self.topology.index, self.num_replicas_in_sync))

    experimental_distribute_values_from_function = distribute_values_from_function

    # -- output ------------------------------------------------------------------------------------------

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Prints on the chief, and does nothing on other towers."""
        if self.is_chief:
            print_while_terminal_lasts(*args, **kwargs)

    def say_once(self, text: str) -> None:
        """Logs ``text`` on the chief the first time, if there are several towers."""
        if self._several and self.is_chief and text not in self._logged:
            self._logged.add(text)
            log.info("%s", text)

    def summary_writer(self, folder: str | os.PathLike[str], **options: Any) -> Any:
        """Returns TensorBoard's ``SummaryWriter`` on the chief, elsewhere an object whose methods do nothing.

        Raises:
            ModuleNotFoundError: on all towers: tensorboard is not installed.
        """
        if importlib.util.find_spec("tensorboard") is None:
            raise ModuleNotFoundError("strategy.summary_writer needs tensorboard: pip install tensorboard")
        if not self.is_chief:
            return NoWriter()
        from torch.utils.tensorboard import SummaryWriter  # a slow import

        return SummaryWriter(os.fspath(folder), **options)

    def trace(
        self, path: str | os.PathLike[str], *, show: bool = True, **profiler: Any
    ) -> AbstractContextManager[Trace]:
        """Profiles all towers in ``with strategy.trace("trace.json"):``. The chief writes one file for Perfetto.

        All towers must enter and leave the block, outside ``run``. The trace shows each tower as a process, with its
        index, device and host, on one clock. It contains the events of ``torch.profiler``, the steps, and the named
        ranges of their phases. If an exception leaves the block, no file is written.

        Args:
            path: the file, compressed if it ends in ``.gz``. Its folder is created.
            show: whether the chief prints the parts of the towers' steps.
            profiler: arguments of ``torch.profiler.profile``, such as ``with_stack=True``.

        Returns:
            A context manager of a :class:`mirrored.monitor.Trace`, which is filled at the end of the block.

        Raises:
            RuntimeError: inside ``run``, or while another trace or profiler runs.
            ValueError: on all towers, if the chief cannot write the file.
            DisagreementError: on all towers, if some make another call.
        """
        from mirrored.monitor.tracing import trace

        self._check_here("trace()")
        return trace(self.communicator, self.events, path, show=show, **profiler)

    def _trace_on_request(self) -> None:
        """Traces the steps that ``mirrored trace`` requests."""
        if wanted := os.environ.get(_TRACED_STEPS):
            from mirrored.monitor.tracing import TracedSteps

            TracedSteps(self.communicator, self.events, wanted)

    # -- data --------------------------------------------------------------------------------------------

    @instead_of(
        options="distribute_dataset(dataset, global_batch_size) needs none",
        batch_size="global_batch_size=, of all towers together",
    )
    def distribute_dataset(
        self,
        dataset: Any,
        global_batch_size: int | None = None,
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        stand_in: bool = False,
        batch_dims: Dims = None,
    ) -> DistributedDataset:
        """Splits every global batch of ``dataset`` among the towers.

        Step k uses the same examples for any number of towers. Each tower receives a contiguous share, split like
        ``numpy.array_split``, which is empty if there are fewer examples than towers. No example is repeated or
        dropped. Random augmentation in ``dataset[i]`` is seeded with (seed, epoch, i).

        Args:
            dataset: an object with ``__getitem__`` and ``__len__``; a tuple or dict of tensors with equal length, which
                are sliced (a list is a list of examples); an ``IterableDataset``, which must be the same on all towers;
                or a ``DataLoader``, whose batch size is the global one and whose settings are kept.
            global_batch_size: examples per step over all towers. Omit it for a ``DataLoader``.
            shuffle: whether every epoch has a new order, from (seed, epoch).
            drop_last: whether an incomplete last batch is dropped.
            seed: default: the seed of the generator of a ``DataLoader`` or its sampler, or the strategy's, or 0.
            collate_fn: collates a list of examples into a batch. For an empty share it is called with one example and
                with two; the dimensions that differ are the batch dimensions.
            num_workers: the number of loader processes of each tower.
            stand_in: whether a tower with an empty share receives one example of another tower that does not count
                (:mod:`mirrored.empty_shares`), for models that do not support an empty batch.
            batch_dims: the batch dimensions of ready-made batches (of a ``DataLoader`` with ``batch_size=None``), see
                :mod:`mirrored.data.batch_dims`. By default they are inferred if they are unambiguous.

        Raises:
            ValueError, TypeError: the arguments contradict each other or the data.
            DisagreementError: at the start of an epoch, on all towers: their data, settings or positions differ.
        """
        refuse_inside_run("distribute_dataset()", "call it once, before the loop over the epochs")
        return distribute(
            self._distribution,
            dataset,
            global_batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=operator.index(seed) if seed is not None else None,
            default_seed=operator.index(self._seed or 0),
            collate_fn=collate_fn,
            num_workers=num_workers,
            stand_in=stand_in,
            batch_dims=batch_dims,
        )

    experimental_distribute_dataset = distribute_dataset

    @instead_of(dataset_fn="fn=", options="leave it out")
    def distribute_datasets_from_function(
        self, fn: Callable[[InputContext], Any], *, stand_in: bool = False, batch_dims: Dims = None
    ) -> DistributedDataset:
        """Creates a dataset from the pipeline that ``fn(InputContext)`` builds on each tower.

        The batches of a tower's pipeline are its shares. A tower whose pipeline ends first continues with empty shares.

        Args:
            stand_in, batch_dims: see :meth:`distribute_dataset`. A stand-in is an example of the pipeline's last batch.

        Raises:
            TypeError, ValueError: on all towers, if the number of examples in a batch is unknown.
        """
        from mirrored.data.streams import PipelineDataset

        refuse_inside_run("distribute_datasets_from_function()", "call it once, before the loop over the epochs")
        pipeline = fn(InputContext(self.num_replicas_in_sync, self.topology.index, self.num_replicas_in_sync))
        return PipelineDataset(self._distribution.of_dataset(stand_in), pipeline, self._seed or 0, batch_dims)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(tower {self.topology.index} of {self.num_replicas_in_sync} on {self.device})"

    if not TYPE_CHECKING:  # a type checker would take any name for an attribute

        def __getattr__(self, name):
            from mirrored.foreign_names import missing

            raise missing("Strategy", name)


class NoWriter:
    """Replaces a ``SummaryWriter`` on towers that do not write. Every method does nothing and returns None."""

    def __enter__(self) -> NoWriter:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *args, **kwargs: None
