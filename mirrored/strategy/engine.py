"""Assembles a strategy's features, and attaches them to models, optimizers and the moments of a training.

[Note: the order of features] If two features listen to one moment, their order counts. At the start of a run, recorded
models are mirrored before the mirror check reads them. Before an optimizer steps, virtual towers and the averager make
sure that its gradients are averaged, the mirror check records the optimizer, and the sharder prepares its step. In a
run on a stand-in, its running statistics are restored last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from mirrored.attached.mirror_check import LastCheck, MirrorCheck
from mirrored.events import enclose_runs
from mirrored.interceptor import interceptor
from mirrored.shares import Distribution
from mirrored.strategy.guard import EarlyBackwardGuard, OptimizerGuard, guard_keras_layers
from mirrored.strategy.scope import Recorder, has_uninitialized, in_first_forward
from mirrored.strategy.uncompiled import untraced
from towers import mirroring
from towers.collectives.agreement import RepeatedCalls
from towers.gradients.averager import GradientAverager
from towers.gradients.reducer import GradientReducer
from towers.options import CommunicationOptions
from towers.system.messages import get_logger
from towers.system.profiling import range_
from towers.system.tensors import Named
from towers.system.torch_private import split_graphs

if TYPE_CHECKING:
    from mirrored.local import LocalSGD, LocalTraining
    from mirrored.virtual.towers import VirtualTowers
    from towers.gradients.powersgd import LowRankAverage
    from towers.sharding.transport import ShardTransport

log = get_logger("mirrored")

_T = TypeVar("_T")

MIRROR_CHECK_INTERVAL = 250
"""The default of ``mirror_check_interval``: the largest number of runs between two mirror checks."""

_ACTIONS = ("ignore", "warn", "raise")


class LocalSteps(Protocol):
    """The option ``synchronize``: towers step independently and synchronise periodically (:mod:`mirrored.local`)."""

    @property
    def every(self) -> int: ...


@dataclasses.dataclass(frozen=True)
class TrainingOptions:
    """The arguments of :class:`mirrored.MirroredStrategy` with these names, and whether the storage is central.

    Raises:
        ValueError: an option has an invalid value.
    """

    shard_optimizer: bool = False
    virtual_towers: int | None = None
    mirror_check_interval: int | None = MIRROR_CHECK_INTERVAL
    nonfinite_gradients: str = "ignore"
    synchronize: LocalSteps | None = None
    central: bool = False

    def __post_init__(self) -> None:
        interval, action = self.mirror_check_interval, self.nonfinite_gradients
        if interval is not None and (isinstance(interval, bool) or not isinstance(interval, int) or interval < 1):
            raise ValueError(f"mirror_check_interval is {interval!r}, but must be None or a whole number of runs > 0")
        if action not in _ACTIONS:
            raise ValueError(f"nonfinite_gradients is {action!r}, but must be one of {', '.join(_ACTIONS)}")


def _begin_run(engine: weakref.ref[Engine], fn: Callable[..., Any]) -> None:
    """Prepares the engine for a ``run``.

    The reference is weak, so that a dropped strategy is freed at once, with its models.
    """
    untraced.tell_compiler()
    if (living := engine()) is not None:
        living.mirror_pending()


class Engine:
    """Records models, keeps them mirrored, averages their gradients and shards their optimizers' steps.

    On one tower nothing is attached, except for virtual towers, local steps, watched gradients, and central storage on
    an accelerator.

    Args:
        distribution: the towers, and how batches are split among them.

    Attributes:
        averager: averages gradients. On one tower it exists, but without parameters (except for watched gradients).
        virtual: the virtual towers, if there are any.
        local: counts local steps and synchronises parameters, if towers step independently.
        counter: counts backward passes, if checkpoints need their number.
        recorder: the recorded modules and parameters.
        repeated_calls: compares calls that steps repeat, if hosts need not wait for each other; otherwise None.
        is_inner_optimizer: returns whether an optimizer is part of another one (:mod:`towers.sharding.shards`).
        one_tower_reads_state: whether optimizers' state is sharded, and a single tower can read all of it.
        meshes: the meshes of sharded models, and a communicator for each (:mod:`mirrored.fully_sharded`).
        replicated_parts: returns fingerprints of this host's parts of sharded parameters, if hosts replicate them.
        timeout: the deadline of a collective.
    """

    def __init__(
        self, distribution: Distribution, communication: CommunicationOptions, training: TrainingOptions
    ) -> None:
        if training.virtual_towers is not None and communication.wire_dtype != "same":
            raise ValueError(
                f"wire_dtype={communication.wire_dtype!r} rounds gradients that are sent, while virtual_towers promise "
                "the same bits on any number of towers: leave one of the two out"
            )
        way: LocalSGD | None = None
        if training.synchronize is not None:
            from mirrored.local import checked

            way = checked(vars(training), communication)
        self._comm = comm = distribution.comm
        self._several = comm.size > 1 or (training.central and comm.device.type != "cpu")
        self._communication, self._training = communication, training
        self._checks_unasked = training.mirror_check_interval is not None
        self.recorder = Recorder()
        self.one_tower_reads_state = False
        self.meshes: dict[bool, tuple[Any, Any]] = {}
        self.replicated_parts: Callable[[], Sequence[tuple[str, Tensor]]] = tuple
        self.timeout = datetime.timedelta(seconds=communication.timeout_seconds)
        self.is_inner_optimizer: Callable[[Optimizer], bool] = lambda optimizer: False
        self.local: LocalTraining | None = None
        channel = comm.channel() if self._several and way is None else comm
        calls = RepeatedCalls(comm)
        self.repeated_calls = calls if comm.only_queues and way is None else None
        transport: ShardTransport | None = None
        if self._several and training.shard_optimizer:
            from towers.sharding.optimizer import transport_for

            timeout = communication.timeout_seconds
            transport = transport_for(channel, calls, central=training.central, timeout=timeout)
        watch = None
        if training.nonfinite_gradients != "ignore":
            from towers.gradients.nonfinite import GradientWatch

            watch = GradientWatch(channel, raises=training.nonfinite_gradients == "raise")
        self.events = events = distribution.events
        events.begin_run.append(functools.partial(_begin_run, weakref.ref(self)))
        compressed: LowRankAverage | None = None
        if communication.compression is not None:
            from towers.gradients import powersgd

            how = powersgd.checked(communication.compression, vars(training))
            if interceptor().averaging(how) is not None and self._several:
                compressed = powersgd.LowRankAverage(channel, how)
        self.counter: LowRankAverage | VirtualTowers | None = compressed
        averager: GradientAverager
        if way is not None:
            from mirrored.local import LocalTraining

            self.local = LocalTraining(comm, way, events, training.mirror_check_interval)
            averager = self.local.gradients
        else:
            averager = GradientAverager(
                channel,
                communication.bucket_bytes,
                reduction=transport.reduction if transport is not None else compressed,
                lazy=transport.lazy if transport is not None else None,
                calls=calls,
                watch=watch,
            )
        self.averager: GradientReducer = averager
        events.failed.append(averager.break_off_backward)
        self.virtual: VirtualTowers | None = None
        self._features: dict[type, Any] = {}
        if training.virtual_towers is not None:
            from mirrored.virtual.towers import VirtualTowers

            reducer = averager if self._several else None
            self.virtual = self.counter = VirtualTowers(distribution, reducer, self.recorder.modules_with_buffers)
            events.mirrored.append(self.virtual.add)
            events.before_step.append(self.virtual.before_step)
        if self._several:
            self._attach_to_several_towers(averager, training, transport)
            if self.virtual is None and self.local is None and channel.may_overlap and comm.size > 1:
                # otherwise, gradients are averaged after the backward anyway
                size = communication.bucket_bytes or channel.bucket_bytes
                enclose_runs(events, functools.partial(split_graphs, size))
        elif watch is not None or self.local is not None:
            events.mirrored.append(self.averager.add)
        log.debug("attached to tower %d: %s", comm.index, ", ".join(k.__name__ for k in self._features) or "nothing")
        if self._several or self.virtual is not None or self.local is not None:
            self._guard = OptimizerGuard(comm, self.recorder, self.averager, self.is_inner_optimizer, events)

    def _attach_to_several_towers(
        self, averager: GradientAverager, training: TrainingOptions, transport: ShardTransport | None
    ) -> None:
        comm, recorder, events, local = self._comm, self.recorder, self.events, self.local
        sharder = None
        if transport is not None:
            from towers.sharding.optimizer import OptimizerSharder

            sharder = OptimizerSharder(averager, transport)
        check = MirrorCheck(
            comm,
            training.mirror_check_interval if local is None else None,  # synchronisations have their own checks
            recorder.unmirrored,
            buffers=recorder.computed_buffers,
            parts=lambda: self.replicated_parts(),
            with_state=sharder is None and local is None,
            apart=local.apart if local is not None else lambda: False,
            barrier=sharder.barrier if sharder else None,
        )
        events.recorded.append(EarlyBackwardGuard(comm.index, recorder).watch)
        events.mirrored += [averager.add, check.add]
        events.begin_run.append(lambda fn: check.begin_run())
        events.before_step += [lambda optimizer: averager.check_paired(), check.notice]
        events.check.append(check.check)
        guard_keras_layers(comm.index, recorder)
        features: list[Any] = [averager, check]
        if sharder is not None:
            self.is_inner_optimizer = sharder.is_inner
            self.one_tower_reads_state = sharder.state_is_readable
            events.before_step.append(sharder.prepare)
            features.append(sharder)
        if self._checks_unasked:
            features.append(LastCheck(check, averager.digest_of_backwards, comm.health))
        self._features = {type(feature): feature for feature in features}

    def attached(self, kind: type[_T]) -> _T | None:
        """Returns the feature of a class, or None if this strategy does not have it."""
        return self._features.get(kind)

    # -- models ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def recording(self, sync_batch_norm: bool) -> Iterator[None]:
        """Records modules that are created inside the context."""
        self.recorder.start(self._adopt(sync_batch_norm))
        try:
            yield
        finally:
            self.recorder.stop()
            self.events.recorded()

    def add(self, module: nn.Module, sync_batch_norm: bool) -> None:
        """Records an existing module."""
        if (adopt := self._adopt(sync_batch_norm)) is not None:
            for layer in module.modules():
                adopt(layer)
        self._prepare_metrics(module)
        self.recorder.add(module)
        self.events.recorded()

    def _adopt(self, sync_batch_norm: bool) -> Callable[[nn.Module], None] | None:
        """Returns a function that makes a layer normalise over the global batch, or None if that is not needed.

        Raises:
            ValueError: there are virtual towers.
        """
        if sync_batch_norm and self.virtual is not None:
            raise ValueError(
                "sync_batch_norm=True normalises over the global batch, of which virtual towers compute one part after "
                "the other: leave one of the two out (virtual towers' BatchNorm takes each part's statistics, on any "
                "number of towers the same)"
            )
        if not (sync_batch_norm and self._several):
            return None
        from mirrored.attached.batch_norm import BatchNorms

        if (layers := self.attached(BatchNorms)) is None:
            layers = self._features[BatchNorms] = BatchNorms(self._comm, self.recorder.name_of_module)
            self.averager.expect_other_collectives()
        return layers.adopt

    def _mirror_recorded(self) -> None:
        """Makes the recorded tensors equal on all towers, and attaches the features to them."""
        tensors, lazy = self.recorder.take(self.make_equal)
        self.events.recorded()
        if lazy and self.virtual is not None:
            raise RuntimeError(
                f"{type(lazy[0]).__name__} gets its shape in its first forward, which with virtual towers is that of "
                "one part: call the model with an example before the first run"
            )
        for _, root in self.recorder.roots():
            self._prepare_metrics(root)
        for module in lazy:
            in_first_forward(module, self._mirror_lazy)
        parameters = [named for named in tensors if named.kind == "parameter"]
        log.debug("mirrored %d parameters and %d buffers", len(parameters), len(tensors) - len(parameters))
        self.events.mirrored(parameters)

    @property
    def hindrance_to_sharding(self) -> str | None:
        """The option of this strategy that does not support sharded parameters, or None."""
        training, communication = self._training, self._communication
        options = {
            "CentralStorageStrategy": training.central,
            "shard_optimizer=True": training.shard_optimizer,
            "virtual_towers": training.virtual_towers is not None,
            "synchronize": training.synchronize is not None,
            "nonfinite_gradients": training.nonfinite_gradients != "ignore",
            "compression": communication.compression is not None,
            "wire_dtype": communication.wire_dtype != "same",
        }
        return next((option for option, is_used in options.items() if is_used), None)

    def forget(self, module: nn.Module) -> None:
        """Forgets that a module was recorded."""
        self.recorder.forget(module)
        self.events.recorded()

    def is_sharded(self, parameter: Tensor) -> bool:
        """Returns whether ``strategy.shard`` has made this parameter."""
        return self.recorder.is_sharded(parameter)

    def add_sharded(self, module: nn.Module, originals: Mapping[str, Tensor]) -> None:
        """Adds a module whose parameters others shard and reduce. On one tower, it is an ordinary one.

        Args:
            originals: the parameters before.
        """
        if self._several:
            self.recorder.add_sharded(module, originals)
        else:
            self.add(module, sync_batch_norm=False)
            self.recorder.note_replaced(originals, module)

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        """Accumulates gradients on this tower only, inside the context."""
        sharded = list(self.recorder.sharded_models())
        for model in sharded:
            model.set_requires_gradient_sync(False)
        self.recorder.note_accumulated()
        try:
            with self.averager.accumulating():
                yield
        finally:
            for model in sharded:
                model.set_requires_gradient_sync(True)

    def make_equal(self, tensors: list[Named]) -> None:
        """Gives tensors tower 0's values on all towers.

        Raises:
            MirrorError: the towers have not recorded the same tensors.
        """
        if self._several:
            with range_("mirrored::mirror"):
                mirroring.check_equal(self._comm, tensors)
                mirroring.broadcast(self._comm, [named.tensor for named in tensors])

    def _prepare_metrics(self, module: nn.Module) -> None:
        """Makes metrics of torchmetrics in a module support empty shares."""
        if self._several and "torchmetrics" in sys.modules:
            from mirrored.attached import metrics

            metrics.prepare(module, self._comm)

    def _mirror_lazy(self, module: nn.Module) -> None:
        """Mirrors a lazy module when it has received its first batch, inside the forward of all towers."""
        self.recorder.add(module)
        self._mirror_recorded()

    # -- steps -------------------------------------------------------------------------------------------

    @property
    def synchronises_batch_norm(self) -> bool:
        """Whether this code is in a scope whose batch norms use the statistics of the global batch."""
        return self.recorder.adopts

    def mirror_pending(self) -> None:
        """Makes everything recorded since the last call equal on all towers. All towers must call it.

        Raises:
            MirrorError: the towers' models differ.
        """
        if self._several:
            self.averager.refresh()
        if self.recorder.pending:
            self._mirror_recorded()

    def keeping_statistics(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps ``fn`` for a run on a stand-in: running statistics of this tower's examples are restored after it."""
        from mirrored.empty_shares import statistics_kept

        return statistics_kept(self.recorder.roots, self.events.before_step)(fn)

    def check_before(self, call: str) -> None:
        """Checks that all towers hold the same, unless the script disabled automatic checks.

        Args:
            call: a description of the operation in progress, the same on all towers.

        Raises:
            MirrorError, DisagreementError: see ``Strategy.check_mirrored``.
        """
        if self._checks_unasked:
            self.events.check(call)

    @property
    def communicates_in_forward(self) -> bool:
        """Whether the forward of a mirrored model, in its current mode, runs collectives."""
        from mirrored.empty_shares import takes_statistics_of_all_towers

        modules = (module for model in self.recorder.models() for module in model.modules())
        return any(self.recorder.sharded_models()) or any(
            has_uninitialized(module) or (module.training and takes_statistics_of_all_towers(module))
            for module in modules
        )
