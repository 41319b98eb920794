"""Averaging gradients over towers while backward is still running (rule R2, docs/rules.md).

When ``backward()`` returns, every mirrored parameter's ``grad`` is the mean over towers of what each tower
contributed. One backward goes like this:

1. ``_arrive``: autograd has finished a parameter's gradient. The first one opens a *cycle* and asks autograd
   to call ``_finish`` when this backward is done, the outermost one where checkpoints run others within it.
2. ``_launch``: a bucket is full; it is packed and its all-reduce starts, beside the backward that goes on.
   Buckets start in the order of their indices, so that all towers make the same collectives in the same
   order whatever order their gradients came in.
3. ``_finish``: backward is done. What is left is started, the last bucket carrying which buckets this tower
   touched; all results are awaited.

Which buckets take part must be known before they start, and equal on all towers. It is predicted from what happened
after the same backward last time; the closing bucket's tail then tells all towers what any of them touched, and what
was not predicted follows. So a model that takes no part in a backward (the generator, while the discriminator learns)
costs nothing after the first time, and a parameter that a single tower used is exact. The tail also says which backward
this is (:mod:`towers.gradients.pairing`): towers in different ones get an error.

The first backward shows in which order gradients come; where collectives run beside the backward, buckets are then laid
out anew in tower 0's order, so that they fill one after the other.

Where the optimizer's step is shared out and towers share memory, ``_finish`` averages each tower's own part only, and a
gradient is completed when it is used (:mod:`towers.gradients.reduce_scatter`): ``complete``, also called before another
backward adds to gradients that are still there.

``sum_by_tree`` runs such a cycle without autograd, over gradients that were computed ``aside``, and adds instead of
averaging.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NoReturn, ParamSpec, TypeVar

import torch
from torch import Tensor

from towers.collectives.communicator import Communicator, Pending, keep_from_forks
from towers.errors import ForkedError, TowersError
from towers.gradients import flags, pairing
from towers.gradients.buckets import Bucket, DenseSlot
from towers.gradients.flags import Tail
from towers.gradients.layout import Layout
from towers.gradients.nonfinite import GradientWatch
from towers.gradients.pairing import BackwardCounter
from towers.gradients.prediction import Prediction
from towers.gradients.reduce_scatter import Scatter
from towers.gradients.slots import Slot
from towers.health.status import AVERAGING, BACKWARD
from towers.mirroring.mirror import Named
from towers.options import DEFAULT_BUCKET_BYTES
from towers.system.autograd_hooks import GradientHook, when_backward_is_done
from towers.system.memory_layout import gradient_dtype
from towers.system.torch_private import DisableTorchFunctionSubclass, current_graph_task_id, disable_dynamo
from towers.system.uncompiled import refuse_compiled_autograd

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _among_gradients(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """For what handles gradients itself: nothing is recorded, and pending ones are plain memory to it."""

    @functools.wraps(method)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        with torch.no_grad(), DisableTorchFunctionSubclass():
            return method(*args, **kwargs)

    return wrapper


class GradientAverager:
    """Attaches to parameters and keeps their gradients averaged.

    Args:
        channel: a communicator that nothing else uses, so that a collective of the user's in mid-backward
            cannot come between.
        bucket_bytes: size of a bucket.
        announce: tells the other towers, elsewhere than in ``channel``, what this one is about to do, and returns when
            all of them are; raises on all where they are not.
        scatter: leave every tower the average of its own part where that can be, until gradients are used.
        watch: looks at what this tower contributes.

    Attributes:
        generation: counts the layouts of buckets.
        averaged: counts the backwards whose gradients were averaged.
    """

    def __init__(
        self,
        channel: Communicator,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        *,
        announce: Callable[[str], object] = lambda call: None,
        scatter: bool = False,
        watch: GradientWatch | None = None,
    ) -> None:
        self._channel = channel
        self._announce = announce
        self._health = channel.health
        self._phase_outside = ""
        self._watch = watch
        self._scale = channel.prescale
        self._bucket_bytes = bucket_bytes
        self._paused = False
        self._is_aside = False
        self._by_tree = False
        self._unhook: list[Callable[[], None]] = []
        self._followed: list[GradientHook] = []  # by hooks of the script's
        self._backward = BackwardCounter(channel.health)
        self._unread: Callable[[], list[float]] | None = None  # flags of the last backward, where reading them waits
        self._starts_early = False  # not before a backward has been seen that has no other within it
        self._nested = False
        self._task = -1  # of autograd, in which the cycle was opened
        self._arrivals: list[str] | None = None  # of the first backward, until their order is known
        self._any_unsynced = False
        self._next_key = 0
        self._free_keys: list[int] = []
        self._released_keys: list[int] = []
        self.generation = 0
        self.averaged = 0
        self._layout = Layout([], bucket_bytes)
        self._on_gpu = channel.device.type == "cuda"
        self._flags_under_way: Pending | None = None  # who lets go of it lets go of its tensors, too
        self._scatter = Scatter(channel, channel.regions) if scatter and channel.regions is not None else None
        self._lay_out([])
        keep_from_forks(self)

    @property
    def buckets(self) -> list[Bucket]:
        """Of the present layout."""
        return self._layout.buckets

    def add(self, parameters: Sequence[Named]) -> None:
        """Average the gradients of these too. All towers add the same, in the same order.

        Raises:
            TowersError: the last backward ended in an exception, so towers may be out of step.
        """
        self._check_whole()
        self.check_paired()
        self.complete_if_held()
        self._lay_out(self._layout.kept(self._channel) + list(parameters))
        self._arrivals = [] if self._channel.regions is None else None

    def _lay_out(self, parameters: Sequence[Named]) -> None:
        unsynced = self.unsynced()
        averaged = {id(slot.parameter): slot.averaged for slot in self._layout.slots}
        for remove in self._unhook:
            remove()
        self._followed = []
        self._free_keys += self._released_keys
        self._released_keys = []
        for bucket in self.buckets:
            self.release_key(bucket.key)
        self.generation += 1
        self._layout = layout = Layout(parameters, self._bucket_bytes)
        for bucket in self.buckets:
            bucket.key = self.new_key()
        # Sparse gradients are averaged whole, and an optimizer that shares out its steps refuses them.
        self._scattering = None if layout.sparse else self._scatter
        if self._scattering is not None:
            self._scattering.divide(self.buckets)
            for dense_slot in layout.dense:
                dense_slot.complete = self.complete
        for slot in layout.slots:
            slot.unsynced = id(slot.parameter) in unsynced
            slot.averaged = averaged.get(id(slot.parameter), 0)
        self._in_cycle = False
        self._started: list[tuple[Bucket, Pending | None]] = []
        self._prediction = Prediction(layout.trainable())
        self._expected = self._prediction.next()
        self._next = 0
        self._unhook = []
        for slot in layout.slots:
            self._hook(slot)

    def _hook(self, slot: Slot) -> None:
        parameter = slot.parameter
        if parameter is None or not (parameter.is_floating_point() or parameter.is_complex()):
            return
        if isinstance(slot, DenseSlot):
            hook = GradientHook(parameter, lambda parameter: self._arrive(parameter, slot, hook))
        else:
            hook = GradientHook(parameter, lambda parameter: self._arrive_sparse(parameter, slot))
        self._unhook.append(hook.remove)
        if self._scattering is not None:
            trainable = parameter.requires_grad
            parameter.requires_grad_(True)  # torch hooks no others
            self._unhook.append(parameter.register_hook(lambda _: self._before_adding()).remove)
            parameter.requires_grad_(trainable)

    def refresh(self) -> None:
        """Take notice of parameters that were converted or moved since the last step.

        Raises:
            TowersError: the last backward ended in an exception, so towers may be out of step.
        """
        self._check_whole()
        self.check_paired()
        for hook in self._followed:
            hook.come_last()
        self._followed = []
        if (converted := self._layout.converted()) is not None:
            self._announce(f"a run() after the model was converted or moved ({converted})")
            self.complete_if_held()
            self._lay_out(self._layout.kept(self._channel))

    def new_key(self) -> int:
        """A key of the channel's memory; towers that ask for keys in the same order get the same."""
        if self._free_keys:
            return self._free_keys.pop()
        self._next_key += 1
        return self._next_key - 1

    def release_key(self, key: int) -> None:
        """Nothing is reduced under ``key`` any more. It is used again after the next layout, for which all have met."""
        self._channel.release(key)
        self._released_keys.append(key)

    def slot_of(self, parameter: Tensor) -> Slot | None:
        """A parameter's slot, if its gradients are averaged: a place in a bucket, or a sparse one."""
        return self._layout.slot_of(parameter)

    def averaged_since(self, number: int, parameters: Iterable[Tensor]) -> bool:
        """Whether gradients of any of these were averaged after backward ``number`` (as of :attr:`averaged`)."""
        slots = (self._layout.slot_of(parameter) for parameter in parameters)
        return any(slot is not None and slot.averaged > number for slot in slots)

    def note_averaged(self, parameters: Iterable[Tensor]) -> None:
        """The gradients of these have been averaged by other means."""
        self.averaged += 1
        for parameter in parameters:
            if (slot := self._layout.slot_of(parameter)) is not None:
                slot.averaged = self.averaged

    # -- own parts only ----------------------------------------------------------------------------------

    @disable_dynamo
    @_among_gradients
    def complete(self) -> None:
        """Get the others' parts of gradients of which this tower has its own only; all towers call it, or none.

        Raises:
            DisagreementError: on all towers, when only some use a gradient.
        """
        if self._scatter is not None and self._scatter.incomplete:
            self._scatter.complete()
            for slot in self._layout.dense:
                slot.make_plain()

    def complete_if_held(self) -> None:
        """Before gradients change: complete them if anybody still holds one."""
        if self._scatter is not None and self._scatter.incomplete:
            if any(slot.pending is not None for slot in self._layout.dense):
                self.complete()
            self._scatter.drop()

    def barrier(self, purpose: str) -> None:
        """Meet the others after this tower's part of the gradients was averaged (:meth:`Barrier.wait_tagged`)."""
        assert self._channel.regions is not None
        self._channel.regions.barrier.wait_tagged(purpose)
        if self._scatter is not None:
            self._scatter.settle_debts(by_meeting=True)

    def _before_adding(self) -> None:
        """Autograd is about to add to a gradient, or to make one."""
        if self._scatter is not None and not self._in_cycle and not self._is_aside:
            self.complete_if_held()
            self._scatter.settle_debts()

    # -- one backward ------------------------------------------------------------------------------------

    @_among_gradients
    def disown(self, error: ForkedError) -> None:
        """This process was forked from a tower: its gradients are not to lie in memory that it shares with the towers.

        Autograd adds to a gradient before any hook could refuse to.
        """
        for slot in self._layout.dense:
            if (parameter := slot.parameter) is not None and slot.is_in_view(parameter.grad):
                parameter.grad = None

    def give_up(self, error: BaseException) -> None:
        """The script's step has ended in ``error``. Towers that wait for an open backward's gradients are told."""
        if self._in_cycle:
            self._channel.break_off(error)

    def _check_whole(self) -> None:
        if self._in_cycle:
            raise TowersError(
                f"a backward() on tower {self._channel.index} ended in an exception before its gradients were "
                "averaged; the towers are out of step and cannot go on: start again from the last checkpoint"
            )

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, gradients accumulate on this tower alone; the next backward outside averages them too."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, gradients are the caller's business: they are computed as if nothing were attached.

        Raises:
            TowersError: the last backward ended in an exception, or this is inside ``paused``.
        """
        self._check_whole()
        if self._paused:
            raise TowersError(f"tower {self._channel.index} adds up gradients of all towers inside no_sync()")
        if unsynced := self.unsynced():
            raise TowersError(
                f"the gradient of {next(iter(unsynced.values()))} on tower {self._channel.index} was accumulated under "
                "no_sync and not averaged yet: adding up virtual towers' gradients would mix the two"
            )
        with torch.no_grad(), DisableTorchFunctionSubclass():
            self.complete_if_held()
        if self._scatter is not None:
            self._scatter.settle_debts()
        self._health.train()
        self._is_aside = True
        try:
            yield
        finally:
            self._is_aside = False

    @disable_dynamo
    @_among_gradients
    def contribute_nothing(self) -> None:
        """Take part in a backward of the other towers without one of this tower's own.

        Raises:
            TowersError: the last backward ended in an exception, so towers may be out of step.
        """
        self._check_whole()
        self._before_adding()
        if self._paused:
            self._health.train()
            return
        self._begin()
        self._finish()

    @disable_dynamo
    @_among_gradients
    def sum_by_tree(self) -> None:
        """Replace every gradient by the sum over all towers, added in the order of a balanced tree; all towers call it.

        A parameter without a gradient on any tower keeps none; on some towers, those contribute zeros.
        """
        self._check_whole()
        self._begin()
        for slot in self._layout.slots:
            slot.arrived = (parameter := slot.parameter) is not None and parameter.grad is not None
        self._by_tree = True
        try:
            self._finish()
        finally:
            self._by_tree = False
            for slot in self._layout.dense:
                slot.make_plain()

    def unsynced(self) -> dict[int, str]:
        """Parameters whose gradient holds parts that were not averaged: name by ``id`` of the parameter."""
        if not self._any_unsynced:
            return {}
        return {id(slot.parameter): slot.name for slot in self._layout.slots if slot.holds_unsynced}

    def note_synced(self, parameters: Iterable[Tensor]) -> None:
        """What these parameters hold has been averaged by other means: nothing of it is this tower's own any more."""
        for parameter in parameters:
            if (slot := self._layout.slot_of(parameter)) is not None:
                slot.unsynced = False

    @property
    def in_backward(self) -> bool:
        """Whether autograd is running, or has begun a backward whose gradients are not averaged yet."""
        return self._in_cycle or current_graph_task_id() != -1

    def _arrive(self, parameter: Tensor, slot: DenseSlot, hook: GradientHook) -> None:
        if self._hold_back(slot, parameter):
            return
        bucket = slot.bucket
        gradient = parameter.grad
        if gradient is not None and gradient.dtype != slot.dtype != gradient_dtype(parameter):
            self._refuse_converted(slot)
        if bucket.launched:
            self._refuse_late(slot)
        if self._on_gpu:
            bucket.follow()
        is_last = hook.is_last(parameter)
        if slot.large and is_last:
            self._bring(slot)
        if slot.arrived:
            return
        slot.arrived = True
        if self._arrivals is not None:
            self._arrivals.append(slot.name)
        if not is_last:  # what comes after may change the gradient, so that its bucket is packed when all are done
            self._followed.append(hook)
            return
        bucket.missing -= 1
        if bucket.missing == 0 and self._starts_early:
            self._launch_full()

    def _arrive_sparse(self, parameter: Tensor, slot: Slot) -> None:
        if not self._hold_back(slot, parameter):
            slot.arrived = True

    def _hold_back(self, slot: Slot, parameter: Tensor) -> bool:
        """Whether this gradient is not to be averaged now; else a cycle is open.

        Inside ``paused`` it is noted, inside ``aside`` not even that. Autograd also calls the hooks of parameters that
        were frozen since the forward, and adds nothing.
        """
        if self._is_aside or not parameter.requires_grad:
            return True
        if torch.is_grad_enabled() and parameter.grad is not None and parameter.grad.requires_grad:
            self._refuse_graph(slot)
        if self._paused:
            slot.unsynced = self._any_unsynced = True
            self._health.train()
        elif not self._in_cycle:
            self._begin()
            when_backward_is_done(self._finish)
        elif not self._starts_early and self._task != current_graph_task_id():
            self._nested = True
        return self._paused

    def _refuse_graph(self, slot: Slot) -> NoReturn:
        raise TowersError(
            f"backward(create_graph=True) gave parameter {slot.name} on tower {self._channel.index} a gradient that a "
            "further backward goes through; averaged over the towers it would be a constant there, and a penalty on it "
            "without effect. Take the gradients of the penalty by torch.autograd.grad(loss, parameters, "
            "create_graph=True), add the penalty to the loss, and call backward() once, without create_graph"
        )

    def _refuse_converted(self, slot: Slot) -> NoReturn:
        raise TowersError(
            f"parameter {slot.name} was converted inside a step on tower {self._channel.index}: its gradients were of "
            f"{slot.dtype} when strategy.run(...) began. Convert a model (model.to, model.float, model.half) between "
            "two runs, on all towers"
        )

    def _refuse_late(self, slot: DenseSlot) -> NoReturn:
        raise TowersError(
            f"parameter {slot.name} has received a gradient on tower {self._channel.index} after its bucket was "
            "already on its way to the other towers: a second one in one backward() (reentrant checkpointing does "
            "this to shared parameters: use torch.utils.checkpoint with use_reentrant=False), or requires_grad was "
            "changed during backward()"
        )

    def _begin(self) -> None:
        self._channel.check_whole()  # before anything is written where others may read it
        refuse_compiled_autograd(self._channel.index)
        self.check_paired()
        self._health.train()
        self._backward.begin()
        self.averaged += 1
        self._in_cycle = True
        self._task = current_graph_task_id()
        self._phase_outside = self._health.phase
        self._health.enter(BACKWARD)
        for bucket in self.buckets:
            bucket.count_missing()
        self._expected = self._prediction.next()
        self._next = 0
        self._started = []

    def _launch_full(self) -> None:
        """Start all buckets that are full and whose turn it is, but the closing one."""
        while self._next < len(self._expected) - 1:
            bucket = self.buckets[self._expected[self._next]]
            if bucket.missing:
                return
            self._launch(bucket)
            self._next += 1

    @_among_gradients
    def _bring(self, slot: DenseSlot) -> None:
        slot.bucket.bring(slot, self._channel, self._scale, self._layout.closing)

    @_among_gradients
    def _launch(self, bucket: Bucket, closing: Sequence[bool] | None = None) -> None:
        if self._on_gpu:
            bucket.follow()
        if self._watch is not None:
            self._watch.look(bucket.slots)
        scale = 1.0 if self._by_tree else self._scale
        buffer = bucket.pack(self._channel, scale, closing, self._layout.closing, tail=not self._on_gpu)
        together = self._by_tree or self._scattering is not None
        self._started.append((bucket, None if together else self._channel.start_average(buffer)))

    @_among_gradients
    def _finish(self) -> None:
        self._health.enter(AVERAGING)
        for bucket, _ in self._started:
            bucket.check_untouched(self._channel.index)
        touched = self._layout.touched()
        closing = [*touched, *self._backward.flags()]
        *others, last = self._expected[self._next :]
        for index in others:
            self._launch(self.buckets[index])
        self._launch(self.buckets[last], closing)
        tail = self._await(closing)
        if self._on_gpu and all(touched):  # then nobody can have touched more than this tower
            self._unread = lambda: self.buckets[last].closing_counts(tail())
        else:
            counts = self._read(self.buckets[last].closing_counts(tail()))
            touched = [count > 0 for count in counts]
        missed = [b for b in self.buckets if touched[b.index] and b.index not in self._expected]
        for bucket in missed:
            self._launch(bucket)
        if missed:
            self._await(closing)
        if self._watch is not None:
            self._watch.look(self._layout.sparse)
        for slot, anyone in zip(self._layout.sparse, touched[len(self.buckets) :], strict=True):
            if anyone:
                (slot.sum_by_tree if self._by_tree else slot.average)(self._channel)
                slot.averaged = self.averaged
        self._prediction.learn(tuple(bucket.index for bucket in self.buckets if touched[bucket.index]) or (0,))
        for bucket in self.buckets:
            bucket.reset()
        self._any_unsynced = False
        self._in_cycle = False
        self._starts_early = not self._nested
        self._health.enter(self._phase_outside)
        if self._arrivals is not None:
            self._adopt_order(self._arrivals)
        if self._watch is not None:
            self._watch.tell()

    def _read(self, counts: list[float]) -> list[float]:
        """What the flags of a backward say of units, after a look whether all towers were in the same backward.

        Raises:
            DisagreementError: on all towers, when they were not.
        """
        if not pairing.agree(counts[self._layout.units :]):
            raise pairing.difference(self._channel, self._backward)
        return counts[: self._layout.units]

    def check_paired(self) -> None:
        """See that the last backward was the same one on all towers, where that has not been looked at yet.

        Raises:
            DisagreementError: on all towers, when it was not.
        """
        unread, self._unread = self._unread, None
        if unread is not None:
            self._read(unread())

    def _adopt_order(self, arrivals: list[str]) -> None:
        """Lay the buckets out as gradients have come on tower 0; those that have not come, after the others."""
        self._arrivals = None
        said = self._channel.all_gather_bytes(json.dumps(arrivals).encode() if self._channel.index == 0 else b"")
        ordered = self._layout.in_order_of(json.loads(said[0]), self._channel)
        if ordered is not None:
            self._lay_out(ordered)

    def _await(self, closing: Sequence[bool]) -> Tail:
        """Finish what was started; returns what gives the sum of the last bucket's tails, which may make one wait."""
        started, self._started = self._started, []
        buckets = [bucket for bucket, _ in started]
        tails: list[Tail] = []
        if self._on_gpu:
            self._flags_under_way, tails = flags.exchange(self._channel, buckets, closing)
        for _, pending in started:
            if pending is not None:
                pending.wait()
        if self._by_tree:
            self._channel.sum_by_tree([bucket.buffer for bucket in buckets if bucket.buffer is not None])
        if self._scattering is not None and not self._by_tree:
            tails = [flags.known(tail) for tail in self._scattering.reduce(buckets)]
        elif not self._on_gpu:
            tails = [flags.known(bucket.tail) for bucket in buckets]
        for bucket, tail in zip(buckets, tails, strict=True):
            bucket.settle(tail, self.averaged, self._channel.index)
        return tails[-1]
