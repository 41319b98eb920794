"""Checkpoints of a run: when they are saved, and from which one a run continues."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch

from mirrored.checkpoint.errors import CheckpointError, Preempted, TrainingStopped
from mirrored.checkpoint.folder import ENDED, STOP, Disk, Folder
from mirrored.checkpoint.manifest import check_name, is_step, name_of
from mirrored.checkpoint.memory import keep_snapshots
from mirrored.checkpoint.restoring import Restored, Restorer
from mirrored.checkpoint.saver import Saver
from mirrored.checkpoint.stopping import StopSignals
from mirrored.checkpoint.tracked import TrackedObject, track
from mirrored.data.dataset import DistributedDataset
from mirrored.interceptor import interceptor
from mirrored.strategy.base import Strategy
from towers.collectives.agreement import StepRequests, announce
from towers.health import failure
from towers.health.failure import EXIT_PREEMPTED, signal_name
from towers.system.log import get_logger
from towers.system.timeouts import clock

log = get_logger("mirrored")

_STOP, _SAVE, _FINISH = 1, 2, 4  # requests
_LOOK_EVERY = 10  # steps between two looks for an evaluator's request


class CheckpointManager:
    """Saves a run's whole state in a folder, and restores it, so that the run continues as if never interrupted.

    A checkpoint holds the given objects, the random numbers of every tower and the step. It is written under another
    name, flushed, and renamed, so every checkpoint in the folder is complete at any instant. All towers make the same
    calls; one of them writes, or one for each folder where hosts do not share it. Restored on the same number of towers
    (with virtual towers: on any), a run ends in the bits of the run that was never interrupted. (Inside ``mirrored
    verify`` nothing is restored or saved.)

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
        strategy: its towers save and restore together.
        folder: is made when it is missing. One run at a time writes there.
        objects: by name: models, optimizers, schedules, scalers, distributed datasets, metrics, and whatever else has
            ``state_dict`` and ``load_state_dict``; dicts and lists of numbers, texts and tensors, which keep their
            identity.
        keep: how many of the newest steps are kept, at least 2. Checkpoints with a name of their own are kept always.
        every_steps: :meth:`step` saves every so many steps.
        every_seconds: :meth:`step` saves when so much time has passed since the last.
        memory_every_steps: :meth:`step` keeps a snapshot in the memory of each host's agent every so many steps, except
            where it saves. A job that starts again after a failure (``restarts=``) goes on from the newest of both.
        asynchronous: whether :meth:`step` and :meth:`save` return while a copy of the state is still being written; the
            next save waits for it. Costs the writing tower the state's size in memory.
        grace_seconds: how long after one of the signals the step may take to end and to be saved; see :meth:`resume`.
        signals: those that ask the run to stop.
        disk: replaces access to the disk in tests.

    Attributes:
        steps: number of steps counted, including those before a restart.
        stalled_seconds: how long training was blocked by saves that succeeded; calls of :meth:`wait` are not counted.

    Raises:
        ValueError: a name or a number is out of range.
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
        memory_every_steps: int | None = None,
        asynchronous: bool = True,
        grace_seconds: float = 30.0,
        signals: Sequence[signal.Signals] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP),
        disk: Disk | None = None,
    ) -> None:
        if not isinstance(objects, Mapping):
            raise TypeError(f"objects is a {type(objects).__name__}, but must be a dict by name: {{'model': model, …}}")
        _check_number("keep", keep, 2)
        if every_steps is not None:
            _check_number("every_steps", every_steps, 1)
        if memory_every_steps is not None:
            _check_number("memory_every_steps", memory_every_steps, 1)
        if every_seconds is not None and not every_seconds > 0:
            raise ValueError(f"every_seconds is {every_seconds!r}, but must be positive")
        if not grace_seconds > 0:
            raise ValueError(f"grace_seconds is {grace_seconds!r}, but must be positive")
        self._strategy = strategy
        self._comm = strategy.communicator
        local = strategy.engine.local
        is_mirrored = strategy.is_mirrored if local is None else lambda parameter: False  # not between synchronisations
        tracked = [
            *(track(name, target, is_mirrored) for name, target in objects.items()),
            *([TrackedObject("mirrored.local", local)] if local is not None else []),
            TrackedObject("mirrored.strategy", strategy),
            TrackedObject("mirrored.streams", strategy.streams),
        ]
        trains = any(isinstance(target, torch.optim.Optimizer) for target in objects.values())  # else: weights alone
        has_data = any(isinstance(target, DistributedDataset) for target in objects.values())
        self._reminds_of_data, self._reminds_of_gradients = trains and not has_data, True
        self._every_steps, self._every_seconds = every_steps, every_seconds
        self._asynchronous = asynchronous
        self._signals = StopSignals(signals, grace_seconds)
        self._requests = StepRequests(self._comm, "CheckpointManager.step()")
        # Each run of `mirrored verify` gets an empty folder, and leaves the checkpoints of the real run alone.
        self._folder = Folder(interceptor().folder(pathlib.Path(folder)), disk or Disk(), keep)
        self.steps = 0
        self.stalled_seconds = 0.0
        self._saved_step: int | None = None
        self._saved_at = clock.monotonic()
        self._requested_save = False
        self._saver = Saver(strategy, self._folder, tracked)
        self._restorer = Restorer(strategy, self._folder, tracked, self._saver.writes)
        every = None if interceptor().compares else memory_every_steps
        self._snapshots = None if every is None else keep_snapshots(strategy, self.folder, tracked, every)

    def step(self) -> None:
        """Call it after each step of training: counts the step, saves when a checkpoint is due, stops on a signal.

        Raises:
            Preempted: SIGTERM, SIGINT or SIGHUP has come to some tower; the step is saved, and the program ends with
                code 75.
            TrainingStopped: inside :meth:`resume`, which takes the exception: an evaluator asks to stop early; the step
                is saved.
            CheckpointError: see :meth:`save`.
        """
        self.steps += 1
        self._strategy.health.count(self.steps)
        local = _STOP if self._signals.received is not None else 0
        due = self._every_seconds is not None and clock.monotonic() - self._saved_at >= self._every_seconds
        if due and self._comm.index == 0 and not self._requested_save:  # all towers learn of it a step later
            local |= _SAVE
            self._requested_save = True
        looks = self._signals.is_entered and self._saver.writes and self.steps % _LOOK_EVERY == 0
        if looks and (reason := self._folder.note(STOP)) is not None:
            log.info("an evaluator stops the training early: %r", reason)
            local |= _FINISH
        requested = self._requests.collect(local)
        if requested & _STOP:
            self._save_last()
            self._end()
        elif requested & _FINISH:
            self._save_last()
            if self._saver.writes:
                self._folder.leave_note(STOP, None)
            raise TrainingStopped
        elif requested & _SAVE or (self._every_steps is not None and self.steps % self._every_steps == 0):
            self.save()
        elif self._snapshots is not None:
            started = clock.monotonic()
            self._snapshots.save(self.steps, wait=not self._asynchronous)
            self.stalled_seconds += clock.monotonic() - started

    def save(self, name: str | None = None, *, wait: bool | None = None) -> None:
        """Save the current state. All towers call it.

        Args:
            name: keeps this checkpoint under a name of its own, such as "best"; default: that of the step.
            wait: return when it is on the disk; default: unless ``asynchronous``.

        Raises:
            ValueError: ``name`` cannot name a checkpoint; or, on all towers, the towers are at different steps.
            TypeError: on all towers: something cannot be saved.
            MirrorError: on all towers: they do not hold the same parameters or state of optimizers any more. (Not with
                ``mirror_check_interval=None``.)
            CheckpointError: on all towers: the one before, which was still being written, failed, and this one was not
                begun; or, with ``wait``, this one failed. Without ``wait``, its own error comes from the next
                :meth:`save`, :meth:`wait` or the end of :meth:`resume`. Earlier ones are unchanged.
            DisagreementError: on all towers: some call something else.
        """
        if name is not None and is_step(check_name(name)):
            raise ValueError(f"a checkpoint's name is {name!r}, which is that of a step; choose another")
        chosen = name if name is not None else name_of(self.steps)
        started = clock.monotonic()
        self._remind()
        wait = not self._asynchronous if wait is None else wait
        with self._strategy.health.during(f"saving checkpoint {chosen}"), self._noting_failure():
            self._saver.save(chosen, self.steps, wait=wait)
        self._strategy.events.saved(chosen)
        if name is None:
            self._saved_step = self.steps
        self._saved_at, self._requested_save = clock.monotonic(), False
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
        """After an error no step counts as saved, on all towers alike."""
        try:
            yield
        except CheckpointError:
            self._saved_step = None
            raise

    def _remind(self) -> None:
        """Log once what is not saved."""
        if self._reminds_of_data and self._comm.index == 0:
            log.info(
                "the saved objects include no distributed dataset: a resumed run starts its data from the beginning"
            )
        self._reminds_of_data = False
        if self._reminds_of_gradients and self._strategy.engine.averager.unsynced():
            self._reminds_of_gradients = False
            log.warning(
                "step %d is saved without the gradients that no_sync() has accumulated, so a run that resumes "
                "from it loses them: call CheckpointManager.step() only after optimizer.step()",
                self.steps,
            )

    @contextlib.contextmanager
    def resume(self) -> Iterator[Restored | None]:
        """Continue from the newest checkpoint that all towers have, or start anew; save at the end.

        Inside, the first SIGTERM, SIGINT or SIGHUP on any tower lets all of them finish the same step, save, and end
        with exit code 75; a second one ends the program at once, and so does the end of ``grace_seconds``. Outside of
        :meth:`step` nothing is interrupted. Where an evaluator stops the training early, :meth:`step` leaves the block
        on all towers, and the script goes on behind it.

        Yields the restored checkpoint; None where there was none.

        Raises:
            CheckpointError: on all towers: there are checkpoints, but none that is intact and that all towers have; or
                the newest does not fit the objects of this run.
        """
        with self._signals:
            restored = self.restore_newest()
            for name in (ENDED, STOP) if self._saver.writes else ():
                self._folder.leave_note(name, None)
            with contextlib.suppress(TrainingStopped):
                yield restored
            self._save_last()
            if any(announce(self._comm, "ends a resumed run", self._signals.received is not None)):
                self._end()
            if self._saver.writes:
                self._folder.leave_note(ENDED, f"after step {self.steps}, at {clock.wall_time()}")

    @property
    def folder(self) -> pathlib.Path:
        """The path."""
        return self._folder.path

    @property
    def written_seconds(self) -> float:
        """How long this tower wrote the newest checkpoint, in a thread or not; 0 where another tower writes."""
        return self._saver.written_seconds

    @property
    def latest(self) -> str | None:
        """The name of the newest step's checkpoint in this tower's folder."""
        steps = self._folder.steps()
        return name_of(steps[-1]) if steps else None

    def restore_newest(self) -> Restored | None:
        """Restore the newest checkpoint that is intact on all towers; None where there are none at all.

        Raises:
            CheckpointError: see :meth:`resume`.
        """
        self._strategy.health.record.set_restores()
        self.wait()
        snapshot = None if self._snapshots is None else self._snapshots.newest()
        restored = self._restorer.restore_newest(snapshot)
        return None if restored is None else self._continue_from(restored)

    def restore(self, name: str) -> Restored:
        """Restore a checkpoint of this folder by its name. All towers call it.

        Raises:
            ValueError: it is no name of a checkpoint.
            CheckpointError: on all towers: it is damaged, or does not fit; nothing was changed then.
        """
        check_name(name)
        self.wait()
        return self._continue_from(self._restorer.restore(name))

    def _continue_from(self, restored: Restored) -> Restored:
        self.steps = restored.step
        self._strategy.health.go_on_after(self.steps)
        if restored.towers != self._comm.size:
            self._strategy.streams.restart(f"resumed at step {restored.step}")
        is_saved = restored.name == name_of(restored.step) and not restored.in_memory
        self._saved_step = restored.step if is_saved else None
        return restored

    def _save_last(self) -> None:
        try:
            self.wait()
        except CheckpointError:  # on all towers: an earlier save, which must not cost the last state
            self.save(wait=True)
            raise
        if self._saved_step != self.steps:
            self.save(wait=True)

    def _end(self) -> NoReturn:
        """All towers end together, after saving."""
        self._comm.barrier()  # the first tower that ends makes its launcher end the others
        if self._comm.index == 0:
            received = self._signals.received
            reason = signal_name(received) if received is not None else "another tower's signal"
            log.info("stopped by %s after step %d, which is saved; run the same command to resume", reason, self.steps)
        self._strategy.health.exit_code = EXIT_PREEMPTED
        failure.end_soon_preempted()
        raise Preempted(self.steps)


def _check_number(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r}, but must be a whole number from {least}")
