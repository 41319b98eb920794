"""Averages gradients over the towers in every backward (rule R2, docs/concepts/towers.md).

When ``backward()`` returns, every mirrored parameter's ``grad`` is the mean over towers of each tower's contribution.
One backward consists of these steps:

1. ``_arrive``: autograd has finished a parameter's gradient. The first gradient opens a cycle
   (:class:`towers.gradients.cycle.Cycle`) and registers ``_finish`` with autograd for the end of this backward: the
   outermost one, if checkpoints run others within it.
2. ``Cycle.start_full``: a bucket is full. From the second backward on, it is packed and started now. Through NCCL and
   Gloo, it is then reduced in parallel with the rest of the backward; in shared memory, together with all others in
   step 3. Buckets start in the order of their indices. So all towers run the same collectives in the same order, in
   whichever order their gradients arrived.
3. ``_finish``: backward is done. ``Cycle.finish`` starts the remaining buckets, and awaits all results. The last
   bucket contains which buckets this tower touched.

[Note: buckets in the order of arrival] The first backward shows in which order gradients arrive. If collectives run in
parallel with the backward, buckets are then laid out again in tower 0's order, so that they fill one after the other.

[Note: a separate communicator] Gradients are averaged over a communicator that no other code uses. Otherwise, a
collective of the script inside a backward could meet a bucket of a tower whose buckets fill in another order.

[Note: the last one averages] If a model is mirrored by one strategy after another, only the last one's averager is
attached to it. A second average of a gradient of which a tower has averaged only its chunk would be wrong. For the
other averagers, its gradients count as averaged.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from towers.collectives.agreement import RepeatedCalls
from towers.collectives.communicator import Communicator, keep_from_forks
from towers.errors import ForkedError, TowersError
from towers.gradients.buckets import WAITING_BYTES, BucketLayout, DenseSlot, Keys, Slot, handles_gradients
from towers.gradients.cycle import Cycle, State, Watch
from towers.gradients.reducer import GradientReducer
from towers.gradients.reductions import AllReduce, Reduction
from towers.system.autograd_hooks import GradientHook, when_backward_is_done
from towers.system.tensors import Named, grad_dtype
from towers.system.torch_private import current_graph_task_id, disable_dynamo


class Hooks(enum.Enum):
    """The effect of parameters' hooks on a gradient."""

    AVERAGE = "it is averaged over the towers"
    ACCUMULATE = "it stays this tower's own (no_sync), and the next backward averages it, too"
    DISABLED = "nothing: as if nothing were attached"


class Lazy(Protocol):
    """Completes gradients of which the reduction has averaged this tower's chunk only.

    :class:`towers.gradients.reductions.ReduceScatter` implements it.
    """

    def defer_rest(self) -> None:
        """Lets the gradients of the averaged backward complete themselves when they are used."""

    def gather(self, *, agreed: bool = False) -> None:
        """Completes the gradients of the averaged backward. All towers call it, or none.

        Args:
            agreed: whether it is certain that all towers call it.
        """

    def complete(self) -> None:
        """Completes the last gradients if they are still held, because some are about to change.

        This happens outside of an averaged backward.

        All towers call it, or none. Until the next backward is averaged, only the first call has an effect.
        """


_attached = WeakIdKeyDictionary()
"""By parameter, the slot and the functions that remove the hooks, of the last averager that took the parameter."""

_IDLE, _ACCUMULATE, _DISABLED = State.IDLE, Hooks.ACCUMULATE, Hooks.DISABLED  # looking up a member takes 0.1 µs


class GradientAverager(GradientReducer):
    """Attaches to parameters and keeps their gradients averaged.

    Args:
        channel: a communicator that no other code uses (see [Note: a separate communicator]).
        bucket_bytes: size of a bucket; None: the channel's.
        reduction: how buckets are averaged. Default: with all-reduces.
        lazy: completes gradients that ``reduction`` leaves incomplete, or None.
        calls: compares calls with the other towers, not through ``channel``.
        watch: inspects this tower's contributions.

    Attributes:
        keys: keys of memory in ``channel``.
        layout: the present buckets. Each new layout is a new object.
    """

    def __init__(
        self,
        channel: Communicator,
        bucket_bytes: int | None = None,
        *,
        reduction: Reduction | None = None,
        lazy: Lazy | None = None,
        calls: RepeatedCalls | None = None,
        watch: Watch | None = None,
    ) -> None:
        self._channel = channel
        self._bucket_bytes = bucket_bytes or channel.bucket_bytes
        self._reduction = reduction or AllReduce(channel)
        self._lazy = lazy
        self._calls = calls or RepeatedCalls(channel)
        self._watch = watch
        self._cycle = Cycle(channel, self._reduction, watch, self._calls)
        self._hooks = Hooks.AVERAGE
        self._unhook: list[Callable[[], None]] = []
        self._overtaken: list[GradientHook] = []  # other hooks of their parameters run after them
        self._arrivals: list[str] | None = None  # names from the first backward, until their order is known
        self._any_unsynced = False
        self.keys = Keys(channel)
        self.layout = BucketLayout([], self._bucket_bytes)
        for bucket in self.layout.buckets:
            bucket.key = self.keys.new()
        self._lay_out([])
        keep_from_forks(self)

    # -- parameters --------------------------------------------------------------------------------------

    def add(self, parameters: Sequence[Named]) -> None:
        self.check_paired()
        self._complete()
        self._lay_out(self.layout.kept(self._channel) + list(parameters))
        # see [Note: buckets in the order of arrival]
        self._arrivals = [] if self._channel.may_overlap else None

    def refresh(self) -> None:
        self.check_paired()
        for hook in self._overtaken:
            hook.come_last()
        self._overtaken = []
        if (converted := self.layout.converted()) is not None:
            self._calls.announce(f"a run() after the model was converted or moved ({converted})")
            self._complete()
            self._lay_out(self.layout.kept(self._channel))

    def _lay_out(self, parameters: Sequence[Named]) -> None:
        """Distributes parameters over new buckets, and attaches to them. All towers have run a collective before."""
        before = {id(slot.parameter()): slot for slot in self.layout.slots}
        for remove in self._unhook:
            remove()
        self._overtaken = []
        self.keys.recycle()
        for bucket in self.layout.buckets:
            self.keys.release(bucket.key)
            bucket.drop_memory()
        self.layout = layout = BucketLayout(parameters, self._bucket_bytes)
        for bucket in layout.buckets:
            bucket.key = self.keys.new()
        for slot in layout.slots:
            if (old := before.get(id(slot.parameter()))) is not None:
                slot.unsynced, slot.averaged = self._any_unsynced and old.holds_unsynced, old.averaged
        self._cycle.lay_out(layout)
        self._unhook = []
        for slot in layout.slots:
            self._attach(slot)

    def _attach(self, slot: Slot) -> None:
        parameter = slot.parameter()
        if parameter is None or not (parameter.is_floating_point() or parameter.is_complex()):
            return
        if parameter in _attached:
            earlier, removers = _attached[parameter]
            earlier.averaged = sys.maxsize  # see [Note: the last one averages]
            for remove in removers:
                remove()
        arrive = functools.partial(GradientAverager._arrive, self, slot)  # faster than with a bound method
        slot.hook = hook = GradientHook(parameter, arrive)
        unhook = [hook.remove]
        if self._lazy is not None:
            trainable = parameter.requires_grad
            parameter.requires_grad_(True)  # torch hooks only such tensors
            unhook.append(parameter.register_hook(lambda _: self._complete()).remove)
            parameter.requires_grad_(trainable)
        _attached[parameter] = slot, unhook
        self._unhook += unhook

    def expect_other_collectives(self) -> None:
        self._cycle.expect_other_collectives()

    def slot_of(self, parameter: Tensor) -> Slot | None:
        """Returns a parameter's slot: a place in a bucket, or a sparse slot; None if its gradient is not reduced."""
        return self.layout.slot_of(parameter)

    def reduces_densely(self, parameter: Tensor) -> bool:
        return isinstance(self.slot_of(parameter), DenseSlot)

    # -- one backward ------------------------------------------------------------------------------------

    def _complete(self) -> None:
        """Completes lazily gathered gradients that are about to change, for example because autograd adds to one."""
        if self._lazy is not None and self._cycle.state is State.IDLE:
            self._lazy.complete()

    def _arrive(self, slot: Slot, parameter: Tensor) -> None:
        """Handles a gradient that autograd has finished.

        Autograd also calls the hooks of parameters that were frozen since the forward. This is one function that calls
        few others, because a call within a backward takes 0.2 µs (``scripts/bench gradients``).
        """
        hooks = self._hooks
        if hooks is _DISABLED or not parameter.requires_grad:
            return
        if torch.is_grad_enabled() and (gradient := parameter.grad) is not None and gradient.requires_grad:
            self._refuse_graph(slot)
        if hooks is _ACCUMULATE:
            slot.unsynced = self._any_unsynced = True
            self._channel.health.train()
            return
        cycle = self._cycle
        if cycle.state is _IDLE:
            cycle.open()
            when_backward_is_done(self._finish)
        if not cycle.may_start_early:
            cycle.look_for_nesting()
        is_first, slot.arrived = not slot.arrived, True
        if not isinstance(slot, DenseSlot):
            return
        bucket = slot.bucket
        if bucket.is_packed or grad_dtype(parameter) is not slot.dtype:
            cycle.check_arrival(slot, parameter)
        streams = bucket.streams
        if streams is not None and streams.number_of(streams.index) != streams.number:
            streams.advance()
        hook = slot.hook
        assert hook is not None
        if len(hook.order) > 1 and not hook.runs_last():
            if is_first:  # its bucket is packed at the end
                self._overtaken.append(hook)
        else:
            if streams is not None:
                bucket.waiting = waiting = bucket.waiting + slot.nbytes
                if waiting >= WAITING_BYTES and bucket.missing > 1:  # the last one is copied together with the flags
                    cycle.copy_in(bucket, [slot for slot in bucket.slots if slot.arrived])
            elif slot.is_large:
                cycle.copy_in(bucket, [slot])
            if is_first:
                bucket.missing = missing = bucket.missing - 1
                if missing == 0 and bucket.count_missing() == 0:
                    cycle.start_full()
        if is_first and self._arrivals is not None:
            self._arrivals.append(slot.name)

    def _refuse_graph(self, slot: Slot) -> None:
        raise TowersError(
            f"backward(create_graph=True) gave parameter {slot.name} on tower {self._channel.index} a gradient that a "
            "further backward goes through; averaged over the towers it would be a constant there, and a penalty on it "
            "without effect. Take the gradients of the penalty by torch.autograd.grad(loss, parameters, "
            "create_graph=True), add the penalty to the loss, and call backward() once, without create_graph"
        )

    def _finish(self, reduction: Reduction | None = None) -> None:
        self._cycle.finish(reduction)
        if self._any_unsynced:
            for slot in self.layout.dense:  # even if no average took place: such a gradient has been dropped
                slot.unsynced = False
        self._any_unsynced = False
        if self._lazy is not None:
            self._lazy.defer_rest()
        if self._arrivals is not None:
            self._adopt_order(self._arrivals)
        if self._watch is not None:
            self._watch.report()

    def _adopt_order(self, arrivals: list[str]) -> None:
        """Lays the buckets out in the order of arrival on tower 0. Gradients that have not arrived follow."""
        self._arrivals = None
        replies = self._channel.all_gather_bytes(json.dumps(arrivals).encode() if self._channel.index == 0 else b"")
        ordered = self.layout.in_order_of(json.loads(replies[0]), self._channel)
        if ordered is not None:
            if self._lazy is not None:
                self._lazy.gather(agreed=True)
            self._lay_out(ordered)

    @disable_dynamo
    @handles_gradients
    def contribute_nothing(self) -> None:
        self._cycle.check_in_step()
        self._complete()
        if self._hooks is Hooks.ACCUMULATE:
            self._channel.health.train()
            return
        self._cycle.open()
        self._finish()

    @disable_dynamo
    @handles_gradients
    def reduce_now(self, kind: Callable[[Communicator], Reduction]) -> None:
        """Reduces the existing gradients, without a backward. All towers call it.

        A parameter without a gradient on any tower keeps none. If some towers have one, the other towers contribute
        zeros.

        Args:
            kind: creates the reduction from the towers' communicator.
        """
        self._cycle.check_in_step()
        self._cycle.open()
        for slot in self.layout.slots:
            slot.arrived = slot.gradient is not None
        self._finish(kind(self._channel))

    @property
    def in_backward(self) -> bool:
        return self._cycle.state is not State.IDLE or current_graph_task_id() != -1

    def check_paired(self) -> None:
        self._cycle.check_paired()

    def digest_of_backwards(self) -> int:
        return self._cycle.backward.digest

    def break_off_backward(self, error: BaseException) -> None:
        if self._cycle.state is State.IDLE:
            return
        if self._channel.size > 1:
            self._channel.break_off(error)
        else:  # a single tower cannot be out of step
            self._cycle = Cycle(self._channel, self._reduction, self._watch, self._calls)
            self._lay_out(self.layout.kept(self._channel))

    @handles_gradients
    def disown(self, error: ForkedError, *, by_main_thread: bool) -> None:
        """Drops gradients in memory that this process, a fork of a tower, shares with the towers.

        Autograd adds to a gradient before any hook could refuse it. A fork of another thread than the main one, such as
        a worker of a data loader, keeps them: reading ``.grad`` would crash it if a backward was replacing it.
        """
        for slot in self.layout.dense if by_main_thread else ():
            if (parameter := slot.parameter()) is not None and parameter.grad is slot.given:
                parameter.grad = None

    # -- gradients that are averaged otherwise, or not ---------------------------------------------------

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        before = self._hooks
        self._hooks = Hooks.DISABLED if before is Hooks.DISABLED else Hooks.ACCUMULATE
        try:
            yield
        finally:
            self._hooks = before

    @contextlib.contextmanager
    def hooks_disabled(self) -> Iterator[None]:
        """Leaves gradients to the caller inside: they are computed as if no hooks were attached.

        It must not be entered inside :meth:`accumulating`; ``strategy.backward`` ensures this.

        Raises:
            TowersError: the last backward ended in an exception, or there are gradients of :meth:`accumulating`.
        """
        self._cycle.check_in_step()
        if unsynced := self.unsynced():
            raise TowersError(
                f"the gradient of {next(iter(unsynced.values()))} on tower {self._channel.index} was accumulated under "
                "no_sync and not averaged yet: adding up virtual towers' gradients would mix the two"
            )
        self._complete()
        self._channel.health.train()
        self._hooks = Hooks.DISABLED
        try:
            yield
        finally:
            self._hooks = Hooks.AVERAGE

    def unsynced(self) -> dict[int, str]:
        if not self._any_unsynced:
            return {}
        return {id(slot.parameter()): slot.name for slot in self.layout.slots if slot.holds_unsynced}

    # -- finished averages -------------------------------------------------------------------------------

    @property
    def averaged(self) -> int:
        return self._cycle.number

    def averaged_since(self, number: int, parameters: Iterable[Tensor]) -> bool:
        return any(slot.averaged > number for slot in self.layout.slots_of(parameters))

    def note_averaged(self, parameters: Iterable[Tensor], *, replaced: bool) -> None:
        self._cycle.number += 1
        for slot in self.layout.slots_of(parameters):
            slot.averaged = self.averaged
            slot.unsynced = slot.unsynced and not replaced
