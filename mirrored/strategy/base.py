"""The strategy: one model on several towers, with the numbers of one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from mirrored.cluster import ClusterResolver
from mirrored.context import ReplicaContext, announce, current_frame, frame
from mirrored.data.input_context import ValueContext
from mirrored.data.shares import Distribution, KnownShares, cut_for
from mirrored.observer import observer
from mirrored.operations import ReduceOp, operation_name
from mirrored.seeds import TowerStreams
from mirrored.stand_in import explain_empty_share, holds_stand_in, shares_at_hand
from mirrored.strategy import share_backward
from mirrored.strategy.calls import RUNS_LATER, check_arguments, refuse_what_runs_later
from mirrored.strategy.distributed_data import DistributedData
from mirrored.strategy.engine import Engine
from mirrored.strategy.options import TrainingOptions
from mirrored.strategy.own_gradients import OwnGradients
from mirrored.strategy.run_kinds import RunKinds
from towers.collectives import values
from towers.collectives.communicator import Communicator
from towers.options import CommunicationOptions, instead_of
from towers.system.log import get_logger
from towers.system.profiling import begin_range, end_range, range_
from towers.topology import Topology

log = get_logger("mirrored")


class Strategy(OwnGradients, DistributedData):
    """The common base of all strategies; make one of its subclasses.

    Every tower is a process that runs the whole script with a strategy of its own, so a "per-replica value"
    is simply each tower's own value, and every method here must be called by all towers alike.

    Attributes:
        num_replicas_in_sync: how many towers train together.
        device: this tower's device.
        is_chief: whether this is tower 0, the one that writes and prints.
        cluster_resolver: what the cluster was read from.
        topology: this tower's place among the others.
        communicator: collectives over all towers.
        health: where this tower is (``step``, the training step as checkpoints count, and a phase), which is what a
            failure report says of it; ``with strategy.health.during("writing the report"):`` adds a phase of the
            script's own.
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
        self._distribution = Distribution(communicator, cut, self.known_shares)
        self.accumulates = False
        self._logged: set[str] = set()
        compared = observer() is not None
        self.streams = TowerStreams(communicator, seed, virtual=cut.virtual, compared=compared)
        self.engine = Engine(self._distribution, options, training)
        self._kinds = RunKinds(self.engine.recorder.models)
        if self._several:
            announce(self)

    @property
    def virtual_towers(self) -> int | None:
        """The number of virtual towers; None where there are none."""
        return self._distribution.cut.parts if self._distribution.cut.virtual else None

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
        if (current := current_frame()) is not None and current.replica is not None:
            raise RuntimeError("scope() was entered inside strategy.run(...); create the model outside of it")
        on_device = torch.device(self.device) if self.device.type != "cpu" else contextlib.nullcontext()
        with self.engine.recording(sync_batch_norm), frame(self, None), on_device:
            yield self

    def mirror(self, module: nn.Module, *, sync_batch_norm: bool = False) -> nn.Module:
        """Mirror a module that was created outside the scope (loaded, copied); returns it.

        It has to be on this tower's device already. Takes effect on the next ``run``. Metrics of torchmetrics count
        every example once from now on, also where a tower's share is empty (:mod:`mirrored.attached.metrics`).

        Args:
            sync_batch_norm: as of :meth:`scope`; takes effect at once. A forward that was put on a BatchNorm object
                is a TypeError.
        """
        self._check_here("mirror()")
        self.engine.add(module, sync_batch_norm)
        return module

    def is_mirrored(self, parameter: torch.Tensor) -> bool:
        """Whether ``parameter`` is kept equal on all towers (at one tower: always)."""
        return self.engine.is_mirrored(parameter)

    # -- running -----------------------------------------------------------------------------------------

    @instead_of(options="strategy.run(step, args=(x, y)) needs none")
    def run(self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call ``fn(*args, **kwargs)`` as this tower's replica and return what it returns.

        Inside, ``backward()`` averages gradients over the towers, losses know the size of the global batch that
        ``args`` came from, and random numbers are this tower's own. Exceptions pass through unchanged, but where this
        tower's share has no examples the message of one of Python's own says so, and what helps models that cannot
        take an empty batch.

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
        outer = self._begin_run()
        self.health.begin_run(self._kinds.begin(fn) if self._several else None)
        replica = ReplicaContext(self, (args, kwargs))
        in_trace = begin_range("mirrored::run")
        try:
            self.engine.begin_run()
            if (watching := observer()) is not None:
                fn = watching.running(replica, fn)
            if self._several and holds_stand_in(self, replica):
                fn = self.engine.keeping_statistics(fn)
            with frame(self, replica), self.streams.inside():
                result = fn(*args, **(kwargs or {}))
            if isinstance(result, RUNS_LATER):
                refuse_what_runs_later(fn, result)
        except BaseException as error:
            if self._several and isinstance(error, Exception):
                explain_empty_share(error, self.topology.index, shares_at_hand(self, replica))
            self.engine.averager.give_up(error)
            raise
        finally:
            end_range(in_trace)
            self._runs_in = outer
        self.health.end_run()
        if self._several:
            self._kinds.learn(self.health.evaluates)
        return result

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

    def backward(
        self,
        loss_fn: Callable[..., torch.Tensor],
        *batch: Any,
        sample_weight: torch.Tensor | float | None = None,
        denominator: Literal["examples", "weights"] = "examples",
    ) -> torch.Tensor:
        """Forward, loss and backward of this tower's share; to be called inside :meth:`run`.

        With ``virtual_towers`` the share is computed virtual tower by virtual tower (:mod:`mirrored.virtual.towers`),
        and the result has the same bits on any number of towers. It is exact gradient accumulation, too: the memory of
        one virtual tower's examples at a time. Without, it is what ``compute_average_loss(loss_fn(*batch)).backward()``
        does where the share has examples; elsewhere this tower takes part in the average and contributes nothing.

        Args:
            loss_fn: called with a virtual tower's part of ``batch``; returns one loss per example, of shape
                ``(examples, …)``. What it draws from the random generators of Python, NumPy and torch depends on
                (seed, step, virtual tower) only. It is not called for parts, or a share, without examples, unless the
                model's forward is a matter of all towers together: BatchNorm over the global batch that trains, and
                lazy modules in their first forward. So it makes no collectives of its own, such as
                ``strategy.reduce``, where a share may be empty (``stand_in=True`` lets none be).
            batch: nested tensors, arrays and lists with an entry for each example of the share, which are cut; numbers
                and other objects are passed as they are. What a ``collate_fn`` made is collated anew for each virtual
                tower, so give the batch's own tensors and dicts, and change them in ``loss_fn``; numbers that it made
                are found in its dicts and tuples only. What does not belong to examples, and what carries a graph,
                ``loss_fn`` makes or takes from outside.
            sample_weight: multiplies the losses; a number, or a tensor of shape ``(examples,)`` or the losses'.
            denominator: "weights" divides by the sum of ``sample_weight`` over all towers instead of the number of
                examples; weights must have the losses' shape then.

        Returns:
            The mean loss over the global batch, a detached scalar, equal on all towers, of the losses' dtype (the
            default one where no tower has examples). After it, ``p.grad`` is its gradient, added to what was there
            before.

        Raises:
            RuntimeError: outside ``run``; with virtual towers, inside ``no_sync``.
            ValueError: ``loss_fn`` does not return one loss per example, there is no batch, something in it cannot be
                cut, or weights do not fit.
            TypeError: the number of examples in ``batch`` cannot be told.
            MirrorError: virtual towers made different things of an integer buffer (on GPUs by a later call).
        """
        self._check_here("backward()")
        current = current_frame()
        if current is None or current.replica is None:
            raise RuntimeError("strategy.backward is for the function that strategy.run(...) calls")
        virtual = self.engine.virtual
        if virtual is None:
            return share_backward.backward(
                self.engine,
                self.communicator,
                loss_fn,
                batch,
                sample_weight,
                denominator,
                empty=self.known_shares.is_empty(batch),
            )
        if self.accumulates:
            raise RuntimeError(
                "strategy.backward() with virtual towers adds up the gradients of all towers, and cannot do so inside "
                "no_sync(); call it outside (a larger virtual_towers saves as much memory as accumulating does)"
            )
        return virtual.backward(loss_fn, batch, sample_weight, denominator, current.replica, self.streams.seed)

    def state_dict(self) -> dict[str, int]:
        """The seed and the number of backwards so far, which decide what the next :meth:`backward` draws."""
        backwards = self.engine.virtual.step if self.engine.virtual is not None else 0
        return {"seed": self.streams.seed, "backwards": backwards}

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
        if self.engine.virtual is not None:
            self.engine.virtual.step = state["backwards"]

    def check_mirrored(self) -> None:
        """See now that all towers hold the same parameters, optimizer state and optimizer settings, bit for bit.

        All towers call it. Buffers are not compared (BatchNorm's running statistics are each tower's own), nor is
        state with ``shard_optimizer=True``. At one tower there is nothing to do. On a GPU it waits for it.

        Raises:
            MirrorError: on all towers with one text: what differs, and which towers hold something else.
            DisagreementError: on all towers, when some call something else.
        """
        self._check_here("check_mirrored()")
        self.engine.check_mirrored("check_mirrored()")

    # -- values ------------------------------------------------------------------------------------------

    @instead_of(reduce_op='reduce("sum", value)', options="leave it out")
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
        with range_("mirrored::reduce"):
            result = values.reduce(self.communicator, operation_name(op), value, axis)
        if (watching := observer()) is not None:
            watching.returned(f"reduce({operation_name(op)!r})", result)
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
        if (watching := observer()) is not None:
            watching.returned("gather()", result)
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
            print(*args, **kwargs)

    def say_once(self, text: str) -> None:
        """Log ``text`` on the chief, the first time it is said, when there are several towers."""
        if self._several and self.is_chief and text not in self._logged:
            self._logged.add(text)
            log.info("%s", text)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(tower {self.topology.index} of {self.num_replicas_in_sync} on {self.device})"
