"""What a strategy attaches to models and optimizers, and what works there while a script trains."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator

import torch
from torch import nn

from mirrored.attached import metrics
from mirrored.attached.batch_norm import BatchNorms
from mirrored.attached.kept_statistics import KeptStatistics
from mirrored.attached.last_check import LastCheck
from mirrored.attached.mirror_check import DEFAULT_INTERVAL, MirrorCheck, check_interval
from mirrored.data.shares import Cut, KnownShares
from mirrored.strategy.guard import EarlyBackwardGuard
from mirrored.strategy.keras_guard import KerasGuard
from mirrored.strategy.scope import AfterFirstForward, Recorder
from mirrored.virtual.towers import VirtualTowers
from towers.collectives.agreement import agree, announce
from towers.collectives.communicator import Communicator
from towers.gradients.averager import GradientAverager
from towers.gradients.nonfinite import LoneWatch, check_action, watch_for
from towers.mirroring import mirror
from towers.options import CommunicationOptions
from towers.sharding.exchange import exchange_for
from towers.sharding.optimizer import OptimizerSharder
from towers.system.uncompiled import Untraced

_untraced = Untraced(
    ["towers", "mirrored"],
    traced=["batch_norm", "batch_norm_calls", "context", "losses", "operations", "stand_in"],  # parts of a model's step
)


@dataclasses.dataclass(frozen=True)
class TrainingOptions:
    """How a strategy trains; the arguments of that name of :class:`mirrored.MirroredStrategy`.

    Raises:
        ValueError: an option is none of its values.
    """

    shard_optimizer: bool = False
    virtual_towers: int | None = None
    mirror_check_interval: int | None = DEFAULT_INTERVAL
    nonfinite_gradients: str = "ignore"

    def __post_init__(self) -> None:
        check_interval(self.mirror_check_interval)
        check_action(self.nonfinite_gradients)


class Engine:
    """Records models, keeps them mirrored, averages their gradients and shares out their optimizers' steps.

    Args:
        comm: the towers. At one tower nothing is attached, but for virtual towers and watched gradients.
        cut, known: how batches are cut, and which are known.

    Attributes:
        averager: averages gradients; None at one tower.
        batch_norms: normalises over the global batch; None at one tower.
        virtual: the virtual towers, if there are any.
        recorder: what was created in the scope.
    """

    def __init__(
        self,
        comm: Communicator,
        cut: Cut,
        known: KnownShares,
        communication: CommunicationOptions,
        training: TrainingOptions,
    ) -> None:
        if training.virtual_towers is not None and communication.wire_dtype != "same":
            raise ValueError(
                f"wire_dtype={communication.wire_dtype!r} rounds gradients that are sent, while virtual_towers promise "
                "the same bits on any number of towers: leave one of the two out"
            )
        self._comm = comm
        self._several = comm.size > 1
        self._checks = training.mirror_check_interval is not None
        self._runs = 0
        self.recorder = Recorder()
        self.averager: GradientAverager | None = None
        self.batch_norms: BatchNorms | None = None
        self.virtual: VirtualTowers | None = None
        self._sharder: OptimizerSharder | None = None
        self._mirror_check: MirrorCheck | None = None
        self._lone_watch: LoneWatch | None = None
        self._early_backward: EarlyBackwardGuard | None = None
        self._statistics: KeptStatistics | None = None
        if self._several:
            agree(comm, "the strategy", dataclasses.asdict(training))
            channel = comm.channel()
            exchange = exchange_for(channel) if training.shard_optimizer else None
            self.averager = GradientAverager(
                channel,
                communication.bucket_bytes,
                reduction=exchange.reduction if exchange is not None else None,
                announce=functools.partial(announce, comm),
                watch=watch_for(channel, training.nonfinite_gradients),
            )
            meet = None
            if exchange is not None:
                self._sharder = OptimizerSharder(self.averager, channel, exchange)
                meet = self._sharder.barrier
            self._mirror_check = MirrorCheck(
                comm,
                training.mirror_check_interval,
                self.recorder.unmirrored,
                with_state=self._sharder is None,
                meet=meet,
            )
            self.batch_norms = BatchNorms(comm, self.recorder.name_of_module)
            self._early_backward = EarlyBackwardGuard(comm.index, self.recorder.describe)
            self._keras = KerasGuard(comm.index, self.recorder.knows)
            if self._checks:
                self._last_check = LastCheck(self._mirror_check, comm.health)
        elif (watch := watch_for(comm, training.nonfinite_gradients)) is not None:
            self._lone_watch = LoneWatch(watch)
        if training.virtual_towers is not None:
            self.virtual = VirtualTowers(comm, cut, known, self.averager)
        self._records = self._several or self.virtual is not None or self._lone_watch is not None

    # -- models ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def recording(self, sync_batch_norm: bool) -> Iterator[None]:
        """Inside, modules that are created are recorded."""
        self._check_batch_norm(sync_batch_norm)
        if not self._records:
            yield
            return
        self.recorder.start(self.batch_norms.adopt if self.batch_norms and sync_batch_norm else None)
        try:
            yield
        finally:
            self.recorder.stop()
            self._watch_recorded()

    def add(self, module: nn.Module, sync_batch_norm: bool) -> None:
        """Record a module that exists already."""
        self._check_batch_norm(sync_batch_norm)
        if self.batch_norms and sync_batch_norm:
            for part in module.modules():
                self.batch_norms.adopt(part)
        if self._several:
            metrics.prepare(module, self._comm)
        if self._records:
            self.recorder.add(module)
            self._watch_recorded()

    def _watch_recorded(self) -> None:
        if self._early_backward is not None:
            self._early_backward.watch(self.recorder.untaken())

    def _check_batch_norm(self, synchronised: bool) -> None:
        if synchronised and self.virtual is not None:
            raise ValueError(
                "sync_batch_norm=True normalises over the global batch, of which virtual towers compute one part after "
                "the other: leave one of the two out (virtual towers' BatchNorm takes each part's statistics, on any "
                "number of towers the same)"
            )

    def _mirror_recorded(self) -> None:
        """Make what was recorded equal on all towers and attach gradient averaging to it."""
        tensors, lazy = self.recorder.take()
        self._watch_recorded()
        if lazy and self.virtual is not None:
            raise RuntimeError(
                f"{type(lazy[0]).__name__} gets its shape in its first forward, which with virtual towers is that of "
                "one part: call the model with an example before the first run"
            )
        if self._several:
            mirror.compare(self._comm, tensors)
            mirror.broadcast(self._comm, [named.tensor for named in tensors])
            for _, root in self.recorder.roots():
                metrics.prepare(root, self._comm)
        for module in lazy:
            AfterFirstForward(module, self._mirror_lazy)
        parameters = [named for named in tensors if named.kind == "parameter"]
        for part in (self._lone_watch, self.averager, self._mirror_check):
            if part is not None:
                part.add(parameters)
        if self.virtual is not None:
            self.virtual.add([named.tensor for named in parameters], self.recorder.modules_with_buffers())

    def _mirror_lazy(self, module: nn.Module) -> None:
        """A lazy module has met its first batch, inside the forward of all towers."""
        self.recorder.add(module)
        self._mirror_recorded()

    def is_mirrored(self, parameter: torch.Tensor) -> bool:
        """Whether ``parameter`` is kept equal on all towers (at one tower: always)."""
        return not (self._several or self.virtual is not None) or self.recorder.is_mirrored(parameter)

    # -- steps -------------------------------------------------------------------------------------------

    def begin_run(self) -> None:
        """A ``run`` begins.

        Raises:
            MirrorError: the towers' models differ, or do not hold the same any more.
        """
        _untraced.tell_compiler()
        self.settle()
        if self._mirror_check is not None:
            self._runs += 1
            if self._runs == self._mirror_check.due:
                self._mirror_check.come_to(self._runs)

    def give_up(self, error: BaseException) -> None:
        """A ``run`` has ended in ``error``, perhaps in the middle of a backward."""
        if self.averager is not None:
            self.averager.give_up(error)

    @contextlib.contextmanager
    def keeping_statistics(self) -> Iterator[None]:
        """Around a run on a stand-in: running statistics that follow this tower's examples are not moved by it."""
        self._statistics = KeptStatistics(m for _, root in self.recorder.roots() for m in root.modules())
        try:
            yield
        finally:
            self._statistics.put_back()
            self._statistics = None

    def settle(self) -> None:
        """Make equal on all towers what was recorded since the last time; all of them call it.

        Raises:
            MirrorError: the towers' models differ.
        """
        if self.averager is not None:
            self.averager.refresh()
        if self.recorder.pending:
            self._mirror_recorded()

    def check_mirrored(self, call: str) -> None:
        """See now that all towers hold the same; all of them call it.

        Args:
            call: what a person would say is being done, the same on all towers.

        Raises:
            MirrorError: on all towers with one text: they do not.
            DisagreementError: on all towers: some call something else.
        """
        if self._mirror_check is not None:
            self._mirror_check.check_now(call, self._runs)

    def check_before(self, call: str) -> None:
        """As :meth:`check_mirrored`, unless the script wants no checks but those that it asks for."""
        if self._checks:
            self.check_mirrored(call)

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Inside, gradients are each tower's own."""
        return self.averager.accumulating() if self.averager is not None else contextlib.nullcontext()

    def unsynced_gradients(self) -> dict[int, str]:
        """Names, by ``id``, of parameters with gradients of ``no_sync`` that were not averaged yet."""
        return self.averager.unsynced() if self.averager is not None else {}

    @property
    def in_backward(self) -> bool:
        """Whether a backward has begun whose gradients are not averaged yet."""
        if self.averager is not None:
            return self.averager.in_backward
        return self.virtual is not None and torch._C._current_graph_task_id() != -1

    @property
    def one_tower_reads_state(self) -> bool:
        """Whether optimizers' state is sharded, and a tower alone can read all of it."""
        return self._sharder is not None and self._sharder.state_is_readable

    def is_inner_optimizer(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer does another's work (:mod:`towers.sharding.inner`)."""
        return self._sharder is not None and self._sharder.is_inner(optimizer)

    def prepare_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer of mirrored parameters is about to step."""
        if self.averager is not None:
            self.averager.check_paired()
        if self._statistics is not None:
            self._statistics.put_back()  # a copy of the model may take them from here
        if self._mirror_check is not None:
            self._mirror_check.notice(optimizer)
        if self._sharder is not None:
            self._sharder.prepare(optimizer)
