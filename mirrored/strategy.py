"""The strategy: one model on several towers, with the numbers of one."""

from __future__ import annotations

import contextlib
import operator
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from mirrored import seeds
from mirrored.cluster import ClusterResolver
from mirrored.context import ReplicaContext, announce, current_frame, frame
from mirrored.data.dataset import DistributedDataset
from mirrored.data.distribute import distribute
from mirrored.data.input_context import InputContext, ValueContext
from mirrored.data.shares import KnownShares
from mirrored.data.streams import PipelineDataset
from mirrored.guard import OptimizerGuard
from mirrored.operations import ReduceOp, operation_name
from mirrored.options import CommunicationOptions
from mirrored.scope import AfterFirstForward, Recorder
from towers import ForkedError, Topology, mirror
from towers.collectives import values
from towers.collectives.communicator import Communicator
from towers.gradients import GradientAverager
from towers.log import get_logger
from towers.sharding import OptimizerSharder

log = get_logger("mirrored")


class Strategy:
    """What all strategies share; make one of its subclasses.

    Every tower is a process that runs the whole script with a strategy of its own, so a "per-replica value"
    is simply each tower's own value, and every method here must be called by all towers alike.

    Attributes:
        num_replicas_in_sync: how many towers train together.
        device: this tower's device.
        is_chief: whether this is tower 0, the one that writes and prints.
        cluster_resolver: what the cluster was read from.
        topology: this tower's place among the others.
        communicator: collectives over all towers.
    """

    def __init__(
        self,
        topology: Topology,
        communicator: Communicator,
        resolver: ClusterResolver | None,
        options: CommunicationOptions,
        seed: int | None,
        shard_optimizer: bool = False,
    ) -> None:
        self.topology = topology
        self.communicator = communicator
        self.cluster_resolver = resolver
        self.device = communicator.device
        self.num_replicas_in_sync = topology.size
        self.is_chief = topology.is_chief
        self.known_shares = KnownShares()
        self._options = options
        self._seed = seed
        self._pid = os.getpid()
        self._several = topology.size > 1
        self._recorder = Recorder()
        self._said: set[str] = set()
        self._streams_parted = not self._several and seed is None
        if seed is not None:
            seeds.seed_all(seed)
        elif self._several:
            seeds.share(communicator)
        if self._several:
            channel = communicator.channel()
            self._averager = GradientAverager(channel, options.bucket_bytes, scatter=shard_optimizer)
            self._sharder = OptimizerSharder(self._averager, channel) if shard_optimizer else None
            self._guard = OptimizerGuard(self)
            announce(self)

    # -- creating the model ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def scope(self) -> Iterator[Strategy]:
        """What is created inside is mirrored: modules' parameters and buffers, on this tower's device.

        Re-entrant. On the first use after leaving (the first ``run``), names, shapes, dtypes and order are
        compared, values are broadcast from tower 0, and gradient averaging is attached. A copy of a whole model
        (``copy.deepcopy``) and one that was loaded count as made elsewhere: give them to :meth:`mirror`.

        Raises:
            RuntimeError: inside another strategy's scope or run, or inside ``run``.
        """
        self._check_here("scope()")
        if (current := current_frame()) is not None and current.replica is not None:
            raise RuntimeError("scope() was entered inside strategy.run(...); create the model outside of it")
        on_device = torch.device(self.device) if self.device.type != "cpu" else contextlib.nullcontext()
        if self._several:
            self._recorder.start()
        try:
            with frame(self, None), on_device:
                yield self
        finally:
            if self._several:
                self._recorder.stop()

    def mirror(self, module: nn.Module) -> nn.Module:
        """Mirror a module that was created outside the scope (loaded, copied); returns it.

        It has to lie on this tower's device already. Takes effect on the next ``run``.
        """
        self._check_here("mirror()")
        if self._several:
            self._recorder.add(module)
        return module

    def is_mirrored(self, parameter: torch.Tensor) -> bool:
        """Whether ``parameter`` is kept equal on all towers (at one tower: always)."""
        return not self._several or self._recorder.is_mirrored(parameter)

    def is_recorded(self, parameter: torch.Tensor) -> bool:
        """Whether ``parameter`` was created in the scope and awaits the first ``run``."""
        return parameter in self._recorder

    def parameter_name(self, parameter: torch.Tensor) -> str:
        """How messages call a parameter."""
        return self._recorder.name_of(parameter)

    def unsynced_gradients(self) -> dict[int, str]:
        """Names, by ``id``, of parameters with gradients of ``no_sync`` that were not averaged yet."""
        return self._averager.unsynced()

    @property
    def in_backward(self) -> bool:
        """Whether a backward has begun whose gradients are not averaged yet."""
        return self._averager.in_backward

    def is_twin(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer does another's work (:mod:`towers.sharding`)."""
        return self._sharder is not None and self._sharder.is_twin(optimizer)

    def prepare_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of this strategy's parameters is about to step."""
        if self._sharder is not None:
            self._sharder.prepare(optimizer)

    # -- running -----------------------------------------------------------------------------------------

    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call ``fn(*args, **kwargs)`` as this tower's replica and return what it returns.

        Inside, ``backward()`` averages gradients over the towers, and losses know the size of the global
        batch that ``args`` came from. Exceptions pass through unchanged.

        Raises:
            MirrorError: on the first use, when the towers' models differ.
            RuntimeError: inside another strategy's scope or run.
            ForkedError: in a process that was forked from a tower.
        """
        self._check_here("run()")
        if self._several:
            self._averager.refresh()
            if self._recorder.pending:
                self._mirror_recorded()
        if not self._streams_parted:
            self._part_streams()
        with frame(self, ReplicaContext(self, (args, kwargs))):
            return fn(*args, **(kwargs or {}))

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, gradients accumulate on each tower alone; the next backward outside averages all of it."""
        self._check_here("no_sync()")
        with self._averager.paused() if self._several else contextlib.nullcontext():
            yield

    def _mirror_recorded(self) -> None:
        """Make what was recorded equal on all towers and attach gradient averaging to it."""
        tensors, lazy = self._recorder.take()
        mirror.compare(self.communicator, tensors)
        mirror.broadcast(self.communicator, [named.tensor for named in tensors])
        for module in lazy:
            AfterFirstForward(module, self._mirror_lazy)
        self._averager.add([named for named in tensors if named.kind == "parameter"])

    def _mirror_lazy(self, module: nn.Module) -> None:
        """A lazy module has met its first batch, inside the forward of all towers."""
        self._recorder.add(module)
        self._mirror_recorded()

    def _part_streams(self) -> None:
        """From the first run on, every tower has random streams of its own (dropout must differ)."""
        self._streams_parted = True
        if self._seed is not None:
            seeds.seed_all(seeds.mix(self._seed, "tower", self.topology.index))
        elif not self.is_chief:  # the chief goes on as a single tower would
            seeds.seed_all(seeds.mix(torch.initial_seed(), "tower", self.topology.index))

    # -- values ------------------------------------------------------------------------------------------

    def reduce(self, op: str | ReduceOp, value: Any, axis: int | tuple[int, ...] | None = None) -> Any:
        """Reduce a value over all towers; every tower gets the result.

        Args:
            op: "sum", "mean", "min", "max", "prod" or :class:`ReduceOp`, in any case.
            value: nested tensors, numpy arrays or numbers.
            axis: None reduces across towers only. An int or tuple also reduces those dimensions of each
                tower's value, along which towers may differ in size; "mean" then divides by the number of
                elements of all towers together, not towers' means by their number.

        Returns:
            The structure of ``value``. Integers sum and multiply to int64 and average to floating point.

        Raises:
            DisagreementError, ValueError, TypeError: on all towers alike.
        """
        self._check_here("reduce()")
        return values.reduce(self.communicator, operation_name(op), value, axis)

    def gather(self, value: Any, axis: int = 0) -> Any:
        """Concatenate every tower's value along ``axis`` in tower order; every tower gets the result.

        Args:
            value: nested tensors or arrays with at least one dimension; only ``axis``'s size may differ.

        Raises:
            DisagreementError, ValueError, TypeError: on all towers alike; a scalar is a ValueError.
        """
        self._check_here("gather()")
        return values.gather(self.communicator, value, axis)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """The values of this process's towers: always one."""
        return (value,)

    experimental_local_results = local_results

    def distribute_values_from_function(self, fn: Callable[[ValueContext], Any]) -> Any:
        """This tower's ``fn(ValueContext)``."""
        return fn(ValueContext(self.topology.index, self.num_replicas_in_sync))

    def print(self, *args: Any, **kwargs: Any) -> None:
        """``print`` on the chief, nothing on the other towers."""
        if self.is_chief:
            print(*args, **kwargs)

    def say_once(self, text: str) -> None:
        """Log ``text`` on the chief, the first time it is said, when there are several towers."""
        if self._several and self.is_chief and text not in self._said:
            self._said.add(text)
            log.info("%s", text)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(tower {self.topology.index} of {self.num_replicas_in_sync} on {self.device})"

    # -- data --------------------------------------------------------------------------------------------

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
    ) -> DistributedDataset:
        """Share out every global batch of ``dataset`` among the towers.

        Step k takes the same examples whatever the number of towers; each tower gets a contiguous share, cut
        as ``numpy.array_split`` cuts, empty when there are fewer examples than towers. Nothing is repeated or
        dropped. Random augmentation in ``dataset[i]`` is seeded by (seed, epoch, i).

        Args:
            dataset: has ``__getitem__`` and ``__len__``; or an ``IterableDataset``, the same on all towers;
                or a ``DataLoader`` whose batch size is the global one, whose settings are kept.
            global_batch_size: examples per step over all towers; left out for a ``DataLoader``.
            shuffle: a new order every epoch, from (seed, epoch).
            drop_last: leave out an incomplete last batch.
            seed: default the strategy's seed, else 0.
            collate_fn: makes a batch of a list of examples; an empty share is its batch of one example, cut.
            num_workers: loader processes of each tower.

        Raises:
            ValueError, TypeError: the arguments contradict each other or the data.
            DisagreementError: when an epoch begins, on all towers, when they were given data of another length
                or other settings, or are at different places in it.
        """
        chosen = operator.index(seed if seed is not None else self._seed if self._seed is not None else 0)
        return distribute(
            self.communicator,
            self.known_shares,
            dataset,
            global_batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=chosen,
            collate_fn=collate_fn,
            num_workers=num_workers,
        )

    experimental_distribute_dataset = distribute_dataset

    def distribute_datasets_from_function(self, fn: Callable[[InputContext], Any]) -> DistributedDataset:
        """Batches from the pipeline that ``fn(InputContext)`` builds on each tower.

        The pipelines' batches are the towers' shares as they are. Towers whose pipeline ends first go on with
        empty shares until all have ended.
        """
        towers = self.num_replicas_in_sync
        pipeline = fn(InputContext(towers, self.topology.index, towers))
        return PipelineDataset(self.communicator, self.known_shares, pipeline)

    def _check_here(self, call: str) -> None:
        if os.getpid() != self._pid:
            raise ForkedError(
                f"{call} was called in a process that was forked after the strategy was made; it is no tower. "
                "Use the strategy in the process that made it"
            )
        current = current_frame()
        if current is not None and current.strategy is not self:
            raise RuntimeError(
                f"{call} of one strategy inside the {'run' if current.replica else 'scope'} of another: strategies "
                "cannot be mixed"
            )
