"""Checkpoints of a run: saved now and then, and gone on from."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from mirrored.checkpoint.disk import Disk
from mirrored.checkpoint.errors import CheckpointError, Preempted, some_of
from mirrored.checkpoint.folder import Folder, Opened, check_name, is_step, name_of
from mirrored.checkpoint.restoring import Restored, restore
from mirrored.checkpoint.saver import Saver
from mirrored.checkpoint.stopping import DUE, STOP, Flags, StopSignals
from mirrored.checkpoint.together import first_problem, raise_first
from mirrored.checkpoint.tracked import TrackedObject, track
from mirrored.data.dataset import DistributedDataset
from mirrored.observer import folder_of
from mirrored.strategy import Strategy
from towers.collectives.agreement import announce
from towers.failure import EXIT_PREEMPTED, signal_name
from towers.log import get_logger

log = get_logger("mirrored")

_STREAMS = "mirrored.streams"


class CheckpointManager:
    """Saves a run's whole state in a folder, and lets the run go on from there as if nothing had happened.

    A checkpoint holds the given objects, the random numbers of every tower and the step. It is written beside the
    others, flushed, and renamed, so at any instant what is there is whole. All towers make the same calls; one of them
    writes, or one for each folder where hosts do not share it. Restored on the same number of towers (with virtual
    towers: on any), a run ends in the bits of the run that was never interrupted. (Inside ``mirrored verify`` nothing
    is restored or saved.)

    ::

        checkpoints = mirrored.CheckpointManager(
            strategy, "results/run", {"model": model, "optimizer": optimizer, "train": train}, every_steps=100
        )
        with checkpoints.resume():
            for epoch in train.epochs(20):
                for x, y in train:
                    strategy.run(train_step, args=(x, y))
                    checkpoints.step()

    Args:
        strategy: whose towers.
        folder: where; made when it is missing. One run at a time writes there.
        objects: by name: models, optimizers, schedules, scalers, distributed datasets, metrics, and whatever else has
            ``state_dict`` and ``load_state_dict``; dicts and lists of numbers, texts and tensors, which keep their
            identity.
        keep: how many of the newest steps are kept, at least 2. Checkpoints with a name of their own are kept always.
        every_steps: :meth:`step` saves every so many steps.
        every_seconds: :meth:`step` saves when so much time has passed since the last.
        asynchronous: whether :meth:`step` and :meth:`save` return while a copy of the state is written; at most one is,
            the next one waits for it. Costs the writing tower the state's size in memory.
        grace_seconds: how long after one of the signals the step may take to end and to be saved; see :meth:`resume`.
        signals: which signals ask the run to stop.
        disk: what writes; for tests.

    Attributes:
        steps: how many steps were counted, those before a restart included.
        folder: the path.
        stalled_seconds: how long saving has held up training, all together.

    Raises:
        ValueError: a name or a number is none.
        TypeError: an object has no state that could be saved.
        CheckpointError: on all towers: the folder cannot be written to, or another run writes there.
    """

    def __init__(
        self,
        strategy: Strategy,
        folder: str | os.PathLike[str],
        objects: Mapping[str, Any],
        *,
        keep: int = 2,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        asynchronous: bool = True,
        grace_seconds: float = 30.0,
        signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
        disk: Disk | None = None,
    ) -> None:
        _check_number("keep", keep, 2)
        if every_steps is not None:
            _check_number("every_steps", every_steps, 1)
        if every_seconds is not None and not every_seconds > 0:
            raise ValueError(f"every_seconds is {every_seconds!r}, but must be positive")
        if not grace_seconds > 0:
            raise ValueError(f"grace_seconds is {grace_seconds!r}, but must be positive")
        self._strategy = strategy
        self._comm = strategy.communicator
        self._tracked = [track(name, thing, strategy.is_mirrored) for name, thing in objects.items()]
        self._own = [TrackedObject("mirrored.strategy", strategy), TrackedObject(_STREAMS, strategy.streams)]
        trains = any(isinstance(thing, torch.optim.Optimizer) for thing in objects.values())  # else it is weights alone
        self._has_data = not trains or any(isinstance(thing, DistributedDataset) for thing in objects.values())
        self._every_steps, self._every_seconds = every_steps, every_seconds
        self._asynchronous = asynchronous
        self._signals = StopSignals(signals, grace_seconds)
        self._flags = Flags(self._comm)
        # A comparison of runs begins anew each time, and leaves the checkpoints of the real one alone.
        self.folder = folder_of(pathlib.Path(folder))
        self._folder = Folder(self.folder, disk or Disk())
        self.steps = 0
        self.stalled_seconds = 0.0
        self._saved_step: int | None = None
        self._saved_at = time.monotonic()
        self._told_due = False
        self._said_unsynced = False
        self._saver = Saver(strategy, self._folder, keep)

    # -- saving ------------------------------------------------------------------------------------------

    def step(self) -> None:
        """A step of training is done: count it, save when it is time, and stop when that was asked for.

        Raises:
            Preempted: SIGTERM, SIGINT or SIGHUP has come to some tower; the step is saved, and the program ends with
                code 75.
            CheckpointError: as of :meth:`save`.
        """
        self.steps += 1
        self._strategy.health.count(self.steps)
        mine = STOP if self._signals.received is not None else 0
        # What is told is answered a step later, on all towers: once is enough.
        due = self._every_seconds is not None and time.monotonic() - self._saved_at >= self._every_seconds
        if due and self._comm.index == 0 and not self._told_due:
            mine |= DUE
            self._told_due = True
        wanted = self._flags.exchange(mine)
        if wanted & STOP:
            self._save_the_last()
            self._end()
        elif wanted & DUE or (self._every_steps is not None and self.steps % self._every_steps == 0):
            self.save()

    def save(self, name: str | None = None, *, wait: bool | None = None) -> None:
        """Save the state as it is now. All towers call it.

        Args:
            name: keeps this checkpoint under a name of its own, such as "best"; default: that of the step.
            wait: return when it is on the disk; default: not where ``asynchronous``.

        Raises:
            ValueError: ``name`` is none for a checkpoint; or, on all towers, the towers are at different steps.
            TypeError: on all towers: something cannot be saved.
            MirrorError: on all towers: they do not hold the same parameters or state of optimizers any more.
            CheckpointError: on all towers: this one, or the one that was still being written, could not be written.
                Those that were there are there still.
            DisagreementError: on all towers: some call something else.
        """
        if name is not None and is_step(check_name(name)):
            raise ValueError(f"a checkpoint's name is {name!r}, which is that of a step; choose another")
        chosen = name if name is not None else name_of(self.steps)
        started = time.monotonic()
        self._remind()
        wait = not self._asynchronous if wait is None else wait
        with self._strategy.health.during(f"saving checkpoint {chosen}"), self._noting_failure():
            self._saver.save(chosen, [*self._tracked, *self._own], self.steps, wait=wait)
        if name is None:
            self._saved_step = self.steps
        self._saved_at, self._told_due = time.monotonic(), False
        self.stalled_seconds += self._saved_at - started

    def wait(self) -> None:
        """Return when nothing is being written. All towers call it.

        Raises:
            CheckpointError: on all towers: the checkpoint that was being written could not be.
        """
        with self._noting_failure():
            self._saver.wait()

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """Nothing counts as saved after an error, on all towers alike."""
        try:
            yield
        except CheckpointError:
            self._saved_step = None
            raise

    def _remind(self) -> None:
        """Say once what is not saved."""
        if not self._has_data and self._comm.index == 0:
            log.info("no distributed dataset is among what is saved: a run that is resumed begins its data anew")
        self._has_data = True
        if self._strategy.engine.unsynced_gradients() and not self._said_unsynced:
            self._said_unsynced = True
            log.warning("gradients of no_sync() are not saved: save after the step that uses them")

    # -- going on ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def resume(self) -> Iterator[Restored | None]:
        """Go on from the newest checkpoint that all towers have, or start anew; save at the end.

        Inside, the first SIGTERM, SIGINT or SIGHUP on any tower lets all of them finish the same step, save, and end
        with exit code 75; a second one ends the program at once, and so does the end of ``grace_seconds``. Outside of
        :meth:`step` nothing is interrupted.

        Yields what was restored; None where there was nothing.

        Raises:
            CheckpointError: on all towers: there are checkpoints, but none is whole, or none that all have; or the
                newest does not fit what is here.
        """
        with self._signals:
            yield self.restore_newest()
            self._save_the_last()
            said = announce(self._comm, "ends a resumed run", self._signals.received is not None)
            if any(other.details for other in said):
                self._end()

    @property
    def written_seconds(self) -> float:
        """How long this tower wrote the newest checkpoint, beside the training or not; 0 where another tower writes."""
        return self._saver.written_seconds

    @property
    def latest(self) -> str | None:
        """The name of the newest step's checkpoint in this tower's folder."""
        steps = self._folder.steps()
        return name_of(steps[-1]) if steps else None

    def restore_newest(self) -> Restored | None:
        """Restore the newest checkpoint that is whole on all towers; None where there are none at all.

        Raises:
            CheckpointError: as of :meth:`resume`.
        """
        self.wait()
        mine = self._folder.steps()
        towers = [said.details for said in announce(self._comm, "looks for checkpoints", mine)]
        common = sorted(set(towers[0]).intersection(*towers[1:]), reverse=True)
        known = {step: tower for tower, steps in reversed(list(enumerate(towers))) for step in steps}
        if not known:
            return None
        if max(known) not in common:
            self._warn(_why_not_newest(max(known), towers))
        problem = ""
        for step in common:
            problem = self._problem_of(name_of(step))
            if not problem:
                return self._restore(name_of(step))
            self._warn(f"{problem}; the checkpoint before it is used, if there is one")
        if not common:
            newest = max(known)
            raise CheckpointError(
                f"no checkpoint in {self.folder} is there for all towers (step {newest} is for tower {known[newest]}): "
                "copy it to the hosts that have none, or remove it to start anew"
            )
        raise CheckpointError(
            f"none of the {len(common)} checkpoints in {self.folder} can be used: {problem}; remove them to start anew"
        )

    def _problem_of(self, name: str) -> str:
        """What is wrong with a checkpoint in some folder; empty when nothing is. Read once for each folder."""
        problem = ""
        if self._saver.writes:
            try:
                Opened(self.folder / name).close()
            except CheckpointError as error:
                problem = str(error)
        return first_problem(self._comm, f"checks checkpoint {name}", problem)

    def restore(self, name: str) -> Restored:
        """Restore a checkpoint of this folder by its name. All towers call it.

        Raises:
            ValueError: it is no name of a checkpoint.
            CheckpointError: on all towers: it is not whole, or does not fit; nothing was changed then.
        """
        check_name(name)
        self.wait()
        if problem := self._problem_of(name):
            raise CheckpointError(problem)
        return self._restore(name)

    def _restore(self, name: str) -> Restored:
        """Restore a checkpoint that is known to be whole."""
        with self._strategy.health.during(f"restoring checkpoint {name}"):
            found = self._take_on(name)
        self.steps = found.step
        self._strategy.health.go_on_after(self.steps)
        if found.towers != self._comm.size:
            self._strategy.streams.part(f"resumed at step {found.step}")
        self._saved_step = found.step if name == name_of(found.step) else None
        if self._comm.index == 0:
            log.info(
                "goes on from %s, after step %d%s", self.folder / name, found.step, _remark(found, self._comm.size)
            )
        return found

    def _take_on(self, name: str) -> Restored:
        opened, problem = None, ""
        try:
            opened = Opened(self.folder / name, check=False)
        except CheckpointError as error:
            problem = str(error)
        raise_first(self._comm, f"opens checkpoint {name}", problem)
        assert opened is not None
        try:
            self._strategy.engine.settle()
            return restore(self._comm, [*self._tracked, *self._own], opened)
        finally:
            opened.close()

    def _warn(self, text: str) -> None:
        if self._comm.index == 0:
            log.warning("%s", text)

    # -- stopping ----------------------------------------------------------------------------------------

    def _save_the_last(self) -> None:
        self.wait()
        if self._saved_step != self.steps:
            self.save(wait=True)

    def _end(self) -> NoReturn:
        """All towers end together, saved."""
        self._comm.barrier()  # whoever ends first makes its launcher end the others
        if self._comm.index == 0:
            by = self._signals.received
            reason = signal_name(by) if by is not None else "another tower's signal"
            log.info(
                "stopped by %s after step %d, which is saved; the same command goes on from there", reason, self.steps
            )
        self._strategy.health.exit_code = EXIT_PREEMPTED
        raise Preempted(self.steps)


def _why_not_newest(newest: int, towers: Sequence[Sequence[int]]) -> str:
    has, has_not = ([str(i) for i, steps in enumerate(towers) if (newest in steps) is there] for there in (True, False))
    return (
        f"the checkpoint of step {newest} is there for tower {', '.join(has)}, but not for tower {', '.join(has_not)}: "
        "the newest that all have is used"
    )


def _remark(found: Restored, towers: int) -> str:
    parts = []
    if found.towers != towers:
        parts.append(f"by {found.towers} towers, now {towers}")
    own = [name for name in found.of_first_tower if not name.startswith("mirrored.")]
    if own:
        parts.append(f"all take tower 0's where towers differed in {some_of(own)}")
    if left := [name for name in found.left if not name.startswith("mirrored.")]:
        parts.append(f"without its {some_of(left)}")
    return f" ({'; '.join(parts)})" if parts else ""


def _check_number(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}, but must be a whole number from {least}")
