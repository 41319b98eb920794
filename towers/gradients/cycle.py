"""The sequence of averaged backwards: which buckets take part, when each starts, and what ends a backward.

[Note: predicted buckets] All towers must start the same collectives in the same order. But the buckets that a backward
touches are known only when it is over, and can differ between towers. Reducing every bucket in every backward would be
exact, but would send a GAN's generator with each step of the discriminator. So each tower predicts the buckets of the
backward that last followed the same predecessor. All towers have seen the same backwards. The last bucket of a backward
informs all towers of the units that any of them touched, and buckets that were not predicted follow. That is always
exact, takes no additional collective, and wastes nothing after the first time. A parameter that a single tower used is
exact, too.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from towers.collectives.agreement import RepeatedCalls
from towers.collectives.communicator import Communicator
from towers.errors import DisagreementError, MirrorError, TowersError
from towers.gradients.buckets import Bucket, BucketLayout, DenseSlot, Slot, handles_gradients
from towers.gradients.flags import (
    BEFORE_ALL,
    Comparison,
    Passed,
    Read,
    Summary,
    different_backwards,
    same_backward,
)
from towers.gradients.reductions import Reduction
from towers.health.failure import leave_if_caught
from towers.health.status import AVERAGING, BACKWARD
from towers.system.profiling import range_
from towers.system.tensors import gradient_dtype
from towers.system.torch_private import COMPILED_AUTOGRAD, compiled_autograd_runs, current_graph_task_id

_MAX_PATTERNS = 64
Pattern = tuple[int, ...]


class Prediction:
    """Predicts the buckets that backwards touch. It is equal on all towers, which have seen the same backwards.

    Args:
        everything: the expected buckets of an unknown backward.
    """

    def __init__(self, everything: Pattern) -> None:
        self._everything = everything
        self._last: Pattern | None = None
        self._follows: dict[Pattern | None, Pattern] = {}

    def next(self) -> Pattern:
        """Returns the buckets that the next backward will touch."""
        return self._follows.get(self._last, self._everything)

    def learn(self, pattern: Pattern) -> None:
        """Records the buckets that the backward has touched."""
        if len(self._follows) >= _MAX_PATTERNS:
            self._follows.clear()
        self._follows[self._last] = pattern
        self._last = pattern


class State(enum.Enum):
    """The state of a :class:`Cycle`."""

    IDLE = "no backward is open"
    COLLECTING = "gradients arrive, and full buckets start"
    FINISHING = "autograd is done; the rest starts, and all results are awaited"


_IDLE, _COLLECTING, _FINISHING = State  # faster than looking up members


class Watch(Protocol):
    """Inspects this tower's contributions (:mod:`towers.gradients.nonfinite`)."""

    def inspect(self, slots: Iterable[Slot]) -> None:
        """Inspects gradients that are about to be reduced."""

    def report(self) -> None:
        """Reports the findings to all towers, after a backward, when they are in step."""


class Cycle:
    """The reductions of one backward; used again for the next one. All towers go through the same cycles.

    ::

               first gradient              autograd is done
        IDLE ──────────────────▶ COLLECTING ──────────────▶ FINISHING
          ▲                                                    │
          └────────────────────────────────────────────────────┘
            all buckets are reduced; towers were in the same backward
            (between GPUs, ``check_paired`` may read that later)

    An exception leaves the state as it is. The towers are then out of step, and :meth:`check_in_step` raises an error.

    Args:
        channel: the towers'.
        reduction: reduces packed buckets.
        watch: inspects this tower's contributions.
        calls: calls that accelerators compare with their backwards.

    Attributes:
        state: changes in :meth:`_enter` only.
        may_start_early: whether buckets may start before backward is over. They may not in the first cycle, and never
            if that one contained a reentrant backward.
        backward: the present one.
        number: the number of averages: opened cycles, and averages by other means (``note_averaged``).
    """

    def __init__(self, channel: Communicator, reduction: Reduction, watch: Watch | None, calls: RepeatedCalls) -> None:
        self.state = State.IDLE
        self.number = 0
        self._channel = channel
        self._reduction = reduction
        self._watch = watch
        self._calls = calls
        self.backward = BEFORE_ALL
        # see [Note: usage flags between GPUs]; on CPUs, tails are read
        self._comparison = None if channel.device.type == "cpu" else Comparison(channel)
        self.may_start_early = False
        self._starts_early = False  # in this cycle
        self._nested = False
        self._task = -1  # autograd's task in which the cycle was opened
        self._phase_outside = ""

    def lay_out(self, layout: BucketLayout) -> None:
        """Sends gradients in the buckets of ``layout`` from now on."""
        self._layout = layout
        self._prediction = Prediction(layout.trainable())

    def check_in_step(self) -> None:
        """Checks that no backward has ended in an exception.

        Raises:
            TowersError: the last one has, so towers may be out of step.
        """
        if self.state is not State.IDLE:
            leave_if_caught()
            raise TowersError(
                f"a backward() on tower {self._channel.index} raised an exception before its gradients were "
                "averaged; the towers are out of step and cannot continue: restart from the last checkpoint"
            )

    def check_paired(self) -> None:
        """Checks that the last backward has finished, and that backwards were the same on all towers, as far as known.

        Raises:
            TowersError: it ended in an exception.
            DisagreementError: on all towers, if one was not the same.
        """
        self.check_in_step()
        if self._comparison is not None and (texts := self._comparison.difference()) is not None:
            raise self._break_off(texts)

    def _enter(self, state: State, phase: str, after: State) -> None:
        assert self.state is after, f"{self.state} is not followed by {state}"
        self.state = state
        self._channel.health.enter(phase)

    def expect_other_collectives(self) -> None:
        """Prepares for backwards with collectives on another communicator ([Note: other collectives in a backward])."""
        if self._comparison is not None:
            self._comparison.other_collectives = True

    # -- one backward ------------------------------------------------------------------------------------

    def open(self) -> None:
        """Starts a cycle: a backward has its first gradient."""
        self._channel.check_in_step()  # before any write to memory that others may read
        if compiled_autograd_runs():  # it calls hooks, but not the callbacks for the end of a backward
            raise TowersError(
                f"compiled autograd runs this backward() on tower {self._channel.index}, and does not report its "
                f"end, so gradients cannot be averaged: leave {COMPILED_AUTOGRAD} off. torch.compile(model) "
                "compiles the model's backward without it"
            )
        self.check_paired()
        self._starts_early = self.may_start_early
        if self._comparison is not None:
            self._comparison.begin()
            self._starts_early &= self._comparison.lets_buckets_start_early()
        self._channel.health.train()
        self.backward = self.backward.next(self._channel.health.place, self._calls.take())
        self.number += 1
        self._phase_outside = self._channel.health.phase
        self._enter(_COLLECTING, BACKWARD, after=_IDLE)
        self._task = current_graph_task_id()
        self._expected = self._prediction.next()
        for index in self._expected:
            self._layout.buckets[index].expect_gradients()
        self._next = 0  # index in the expected buckets
        self._started: list[Bucket] = []

    def look_for_nesting(self) -> None:
        """Notes if a gradient arrives in a backward within the backward, as reentrant checkpoints run one."""
        if self._task != current_graph_task_id():
            self._nested = True

    def check_arrival(self, slot: DenseSlot, parameter: Tensor) -> None:
        """Checks that a gradient that has arrived can be averaged.

        Raises:
            TowersError: it cannot be averaged any more.
        """
        gradient = parameter.grad
        if gradient is not None and gradient.dtype != slot.dtype and gradient_dtype(parameter) != slot.dtype:
            raise TowersError(
                f"parameter {slot.name} was converted inside a step on tower {self._channel.index}: its "
                f"gradients were of {slot.dtype} at the start of strategy.run(...). Convert a model (model.to, "
                "model.float, model.half) between two runs, on all towers"
            )
        if slot.bucket.is_packed:
            raise TowersError(
                f"parameter {slot.name} has received a gradient on tower {self._channel.index} after its bucket was "
                "already on its way to the other towers: a second one in one backward() (reentrant checkpointing does "
                "this to shared parameters: use torch.utils.checkpoint with use_reentrant=False), or requires_grad was "
                "changed during backward()"
            )

    @handles_gradients
    def copy_in(self, bucket: Bucket, slots: Sequence[DenseSlot]) -> None:
        """Copies gradients into their bucket (see [Note: copied at once] in :mod:`towers.gradients.buckets`)."""
        bucket.copy_in(slots, self._channel, self._reduction.scale)

    @handles_gradients
    def start_full(self) -> None:
        """Starts, in order, all full buckets except the last one, if buckets may start before backward is over."""
        if not self._starts_early:
            return
        while self._next < len(self._expected) - 1:
            bucket = self._layout.buckets[self._expected[self._next]]
            if bucket.missing:
                return
            self._start(bucket, self._reduction)
            self._next += 1

    def _start(self, bucket: Bucket, reduction: Reduction, summary: Summary | None = None) -> None:
        with range_("mirrored::bucket"):
            if bucket.streams is not None:
                bucket.streams.advance()
            if self._watch is not None:
                self._watch.inspect(bucket.slots)
            bucket.pack(self._channel, reduction.scale, summary)
            self._started.append(bucket)
            reduction.start(bucket)

    @handles_gradients
    def finish(self, reduction: Reduction | None = None) -> None:
        """Starts the remaining buckets when autograd is done, and awaits all results.

        Args:
            reduction: another one than usual, if no gradient has arrived from autograd.

        Raises:
            DisagreementError, MirrorError, TowersError: the gradients cannot be averaged.
        """
        self._enter(_FINISHING, AVERAGING, after=_COLLECTING)
        with range_("mirrored::average"):
            touched = self._reduce(reduction or self._reduction)
        self._prediction.learn(tuple(b.index for b in self._layout.buckets if touched[b.index]) or (0,))
        self.may_start_early = not self._nested
        self._enter(_IDLE, self._phase_outside, after=_FINISHING)

    def _reduce(self, reduction: Reduction) -> list[bool]:
        """Reduces all units that any tower has touched, and returns for each unit whether a tower has."""
        layout, buckets = self._layout, self._layout.buckets
        for bucket in self._started:
            bucket.check_untouched(self._channel.index)
        touched = layout.touched()
        *others, last = (buckets[index] for index in self._expected[self._next :])
        for bucket in others:
            self._start(bucket, reduction)
        if self._comparison is None:
            self._start(last, reduction, Summary(touched, False, self.backward.bits()))
            touched = self._read(last, self._await(reduction))
        else:
            continues = touched == layout.trainable_units  # no tower can have touched more
            self._start(last, reduction, Summary(touched, continues, []))
            used = all(all(bucket.flags[: len(bucket.slots)]) for bucket in self._started)
            self._comparison.note(Passed(self.backward, continues and used))
            read = self._await(reduction)
            if not continues:
                touched = self._read(last, read)
        missed = [b for b in buckets if touched[b.index] and b.index not in self._expected]
        for bucket in missed:
            self._start(bucket, reduction)
        if missed:
            self._await(reduction)
        if self._watch is not None:
            self._watch.inspect(layout.sparse)
        for slot, anyone in zip(layout.sparse, touched[len(buckets) :], strict=True):
            if anyone:
                reduction.reduce_sparse(slot)
                slot.averaged = self.number
        return touched

    def _await(self, reduction: Reduction) -> Read:
        """Finishes the started buckets, and returns how to read the flags of the last one."""
        buckets, self._started = self._started, []
        with range_("mirrored::wait"):
            reads: list[Read] | None = None
            if self._comparison is not None:
                reads = self._comparison.gather([bucket.flags for bucket in buckets])
            tails = reduction.finish(buckets)
        reads = reads or [tail.tolist for tail in tails]
        for bucket, read in zip(buckets, reads, strict=True):
            bucket.finish(read, self.number, self._channel.index)
        return reads[-1]

    def _read(self, last: Bucket, read: Read) -> list[bool]:
        """Returns which units any tower has touched, and checks that all towers were in the same backward.

        Args:
            last: the backward's last bucket.
            read: returns the counts of its flags.

        Raises:
            DisagreementError: on all towers, if they were not.
            MirrorError: some tower has unfrozen parameters that another one has not.
        """
        touched, some_continue, backward = Summary.counted(read()[len(last.slots) :], last.units)
        if not same_backward(backward):
            raise self._break_off(self._channel.all_gather_bytes(str(self.backward).encode()))
        if some_continue and (name := self._layout.thawed(touched)) is not None:
            raise MirrorError(
                f"parameter {name} is frozen (requires_grad is False) on some towers, but another tower has computed a "
                "gradient for it: freeze and thaw the same parameters on all towers"
            )
        return touched

    def _break_off(self, texts: Sequence[bytes]) -> DisagreementError:
        """Returns the error of towers in different backwards, whose gradients are already in each other's mean."""
        error = different_backwards(self._channel.towers, texts)
        self._channel.break_off(error)
        return error
