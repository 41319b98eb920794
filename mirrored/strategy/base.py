"""The strategy: one model on several towers, with the losses, gradients and weights that one device would have."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mirrored.cluster.resolver import ClusterResolver
from mirrored.context import ReplicaContext, current_replica, frame, note_towers_of
from mirrored.data.dataset import DistributedDataset
from mirrored.data.distribute import distribute
from mirrored.data.input_context import InputContext, ValueContext
from mirrored.events import Events, show_in_traces
from mirrored.interceptor import interceptor
from mirrored.operations import ReduceOp, operation_name
from mirrored.seeds import TowerStreams
from mirrored.shares import Distribution, KnownShares, cut_for
from mirrored.strategy.calls import RunKinds, check_arguments, refuse_what_runs_later
from mirrored.strategy.engine import Engine
from mirrored.strategy.options import TrainingOptions
from mirrored.strategy.records import Records
from towers.collectives import values
from towers.collectives.agreement import announce
from towers.collectives.communicator import Communicator
from towers.launching.console import print_while_terminal_lasts
from towers.options import CommunicationOptions, instead_of
from towers.system.log import get_logger
from towers.system.profiling import range_
from towers.topology import Topology

if TYPE_CHECKING:
    from mirrored.data.batch_dims import Dims
    from mirrored.variables import Variable

log = get_logger("mirrored")


class Strategy(Records):
    """The common base of all strategies; make one of its subclasses.

    Every tower is a process that runs the whole script with a strategy of its own, so a "per-replica value"
    is simply each tower's own value, and every method here must be called by all towers alike.

    Attributes:
        num_replicas_in_sync: how many towers train together.
        device: this tower's device.
        is_chief: whether this is tower 0, the one that writes and prints.
        virtual_towers: the number of virtual towers; None where there are none.
        cluster_resolver: what the cluster was read from.
        topology: this tower's place among the others.
        communicator: collectives over all towers.
        health: where this tower is, as failure reports say it: ``step``, the training step as checkpoints count, and a
            phase; ``with strategy.health.during("writing the report"):`` adds one of the script's own.
        events: the moments of a training; a script may add listeners (:mod:`mirrored.events`).
        streams: this tower's random numbers.
        engine: what is attached to models and optimizers.
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
        self.streams = TowerStreams(communicator, seed, virtual=cut.virtual, compared=interceptor().compares)
        show_in_traces(self.events)
        kinds = RunKinds(self.events, self.health)
        self.engine = Engine(self._distribution, options, training)
        if self._several:
            kinds.models = self.engine.recorder.models
            note_towers_of(self)
        self._trace_on_request()

    # -- creating the model ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def scope(self, *, sync_batch_norm: bool = False) -> Iterator[Strategy]:
        """Mirror what is created inside: modules' parameters and buffers, on this tower's device.

        Re-entrant. On the first use after leaving (the first ``run``), names, shapes, dtypes and order are
        compared, values are broadcast from tower 0, and gradient averaging is attached. A copy of a whole model
        (``copy.deepcopy``) and one that was loaded count as made elsewhere: give them to :meth:`mirror`.

        Args:
            sync_batch_norm: BatchNorm layers of what is created inside (also in a scope within this one) take mean and
                variance of the global batch when they train, and so need every tower's forward and backward; see
                :mod:`mirrored.attached.batch_norm`. Default: of each tower's share. A forward that takes statistics in
                a way of its own is a RuntimeError when it trains.

        Raises:
            RuntimeError: inside another strategy's scope or run, or inside ``run``.
            ValueError: ``sync_batch_norm`` with virtual towers.
        """
        self._check_here("scope()")
        if current_replica() is not None:
            raise RuntimeError("scope() was entered inside strategy.run(...); create the model outside of it")
        on_device = torch.device(self.device) if self.device.type != "cpu" else contextlib.nullcontext()
        with self.engine.recording(sync_batch_norm), frame(self, None), on_device:
            yield self

    def mirror(self, module: nn.Module, *, sync_batch_norm: bool = False) -> nn.Module:
        """Mirror a module that was created outside the scope (loaded, copied); returns it.

        It has to be on this tower's device already. Takes effect on the next ``run``. Metrics of torchmetrics count
        every example once from now on, also where a tower's share is empty (:mod:`mirrored.attached.metrics`).

        Args:
            sync_batch_norm: see :meth:`scope`; at once. A forward that was put on a BatchNorm object is a TypeError.
        """
        self._check_here("mirror()")
        self.engine.add(module, sync_batch_norm)
        return module

    def is_mirrored(self, parameter: torch.Tensor) -> bool:
        """Whether ``parameter`` is kept equal on all towers (at one tower without virtual ones: always)."""
        return not (self._several or self.engine.virtual is not None) or self.engine.recorder.is_mirrored(parameter)

    # -- running -----------------------------------------------------------------------------------------

    @instead_of(options="strategy.run(step, args=(x, y)) needs none")
    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call ``fn(*args, **kwargs)`` as this tower's replica and return what it returns.

        Inside, ``backward()`` averages gradients over the towers, losses know the size of the global batch that
        ``args`` came from, and random numbers are this tower's own. Exceptions pass through unchanged; where this
        tower's share has no examples, the text of a built-in one also says so, and how such models are trained.

        Raises:
            TypeError: ``args`` is no tuple or list, or ``kwargs`` no mapping; or ``fn`` returns a generator or
                coroutine, whose body would run outside of ``run``.
            MirrorError: on the first use, when the towers' models differ; later, when a check finds that they do not
                hold the same parameters, optimizer state or optimizer settings any more.
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
        return result

    def _explain(self, error: BaseException, replica: ReplicaContext) -> None:
        """Add to an exception of a run that the share has no examples, where that may be why."""
        if self._several and isinstance(error, Exception):
            from mirrored.empty_shares.stand_in import explain_empty_share

            explain_empty_share(error, self.topology.index, self.known_shares.at_hand(replica.arguments))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients accumulate on each tower alone; the next backward outside averages all of it."""
        self._check_here("no_sync()")
        before, self.accumulates = self.accumulates, True
        try:
            with self.engine.averager.accumulating():
                yield
        finally:
            self.accumulates = before

    def barrier(self) -> None:
        """Return when all towers have called it. On GPUs the hosts wait for each other, not for the GPUs.

        Raises:
            DisagreementError: on all towers, when some call something else.
        """
        self._check_here("barrier()")
        if self._several:
            with range_("mirrored::barrier"):
                announce(self.communicator, "strategy.barrier()")

    def check_mirrored(self) -> None:
        """Check now that all towers hold the same parameters, optimizer state and optimizer settings, bit for bit.

        All towers call it. Buffers are not compared (BatchNorm's running statistics are each tower's own), nor is
        state with ``shard_optimizer=True``. At one tower there is nothing to do. On a GPU it waits for it.

        Raises:
            MirrorError: on all towers with one text: what differs, and which towers hold something else.
            DisagreementError: on all towers, when some call something else.
        """
        self._check_here("check_mirrored()")
        self.events.check("check_mirrored()")

    def state_dict(self) -> dict[str, int]:
        """The seed, and the number of backwards where that counts: for what the next one draws, or compression."""
        counter = self.engine.counter
        return {"seed": self.streams.seed, "backwards": counter.step if counter is not None else 0}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where :meth:`state_dict` was taken, on any number of towers. All towers load the same.

        Raises:
            ValueError: it is no such state.
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
        """A :class:`mirrored.variables.Variable`, which towers write; ``other`` are its ``dtype`` and ``name``."""
        from mirrored.variables import Variable

        return Variable(self, self._check_here, value, synchronization, aggregation, **other)

    @instead_of(reduce_op='reduce("sum", value)', options="leave it out")
    def reduce(self, op: str | ReduceOp, value: Any, axis: int | tuple[int, ...] | None = None) -> Any:
        """Reduce a value over all towers; every tower gets the result.

        Args:
            op: "sum", "mean", "min", "max", "prod" or :class:`ReduceOp`, in any case.
            value: nested tensors, numpy arrays or numbers.
            axis: None reduces across towers only. An int or tuple also reduces those dimensions, in which towers may
                differ in size; "mean" then divides by the elements of all towers together, and is no mean of means.

        Returns:
            The structure of ``value``. Integers sum and multiply to int64 and average to floating point.

        Raises:
            DisagreementError, ValueError, TypeError: on all towers alike.
        """
        self._check_here("reduce()")
        with range_("mirrored::reduce"):
            result = values.reduce(self.communicator, operation_name(op), value, axis)
        interceptor().returned(f"strategy.reduce({operation_name(op)!r})", result)
        return result

    def gather(self, value: Any, axis: int = 0) -> Any:
        """Concatenate every tower's value along ``axis`` in tower order; every tower gets the result.

        Args:
            value: nested tensors or arrays with at least one dimension; only ``axis``'s size may differ.

        Raises:
            DisagreementError, ValueError, TypeError: on all towers alike; a scalar is a ValueError.
        """
        self._check_here("gather()")
        with range_("mirrored::gather"):
            result = values.gather(self.communicator, value, axis)
        interceptor().returned("strategy.gather()", result)
        return result

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """The values of this process's towers: always one."""
        return (value,)

    experimental_local_results = local_results

    @instead_of(value_fn="fn=")
    def distribute_values_from_function(self, fn: Callable[[ValueContext], Any]) -> Any:
        """This tower's ``fn(ValueContext)``."""
        return fn(ValueContext(self.topology.index, self.num_replicas_in_sync))

    experimental_distribute_values_from_function = distribute_values_from_function

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on the chief, nothing on the other towers."""
        if self.is_chief:
            print_while_terminal_lasts(*args, **kwargs)

    def say_once(self, text: str) -> None:
        """Log ``text`` on the chief, the first time it is said, when there are several towers."""
        if self._several and self.is_chief and text not in self._logged:
            self._logged.add(text)
            log.info("%s", text)

    if not TYPE_CHECKING:  # a type checker would take any name for an attribute

        def __getattr__(self, name):
            from mirrored.foreign_names import missing

            raise missing("Strategy", name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(tower {self.topology.index} of {self.num_replicas_in_sync} on {self.device})"

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
        """Share out every global batch of ``dataset`` among the towers.

        Step k takes the same examples whatever the number of towers; each tower gets a contiguous share, cut
        as ``numpy.array_split`` cuts, empty when there are fewer examples than towers. Nothing is repeated or
        dropped. Random augmentation in ``dataset[i]`` is seeded by (seed, epoch, i).

        Args:
            dataset: has ``__getitem__`` and ``__len__``; or a tuple or dict of tensors of one length, which stands for
                their slices (a list is one of examples); or an ``IterableDataset``, the same on all towers;
                or a ``DataLoader`` whose batch size is the global one, whose settings are kept.
            global_batch_size: examples per step over all towers; left out for a ``DataLoader``.
            shuffle: a new order every epoch, from (seed, epoch).
            drop_last: leave out an incomplete last batch.
            seed: default that of the generator of a ``DataLoader`` or its sampler, else the strategy's, else 0.
            collate_fn: makes a batch of a list of examples; for an empty share, of one example and of two, of which
                what grows with them is left out.
            num_workers: loader processes of each tower.
            stand_in: give a tower whose share is empty one example of another tower that counts nothing
                (:mod:`mirrored.empty_shares.stand_in`), for models that cannot take an empty batch.
            batch_dims: what is per example in batches that come ready made (a ``DataLoader`` with
                ``batch_size=None``), see :mod:`mirrored.data.batch_dims`. Default: what is certain.

        Raises:
            ValueError, TypeError: the arguments contradict each other or the data.
            DisagreementError: when an epoch begins, on all towers: their data, settings or places in it differ.
        """
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
        """Batches from the pipeline that ``fn(InputContext)`` builds on each tower.

        The pipelines' batches are the towers' shares. A tower whose pipeline ends first goes on with empty shares.

        Args:
            stand_in, batch_dims: see :meth:`distribute_dataset`; a stand-in is an example of the pipeline's last batch.

        Raises:
            TypeError, ValueError: on all towers, when the number of examples in a batch of one cannot be told.
        """
        from mirrored.data.streams import PipelineDataset

        pipeline = fn(InputContext(self.num_replicas_in_sync, self.topology.index, self.num_replicas_in_sync))
        return PipelineDataset(self._distribution.of_dataset(stand_in), pipeline, self._seed or 0, batch_dims)
