"""Checkpoints of a run: when to save, which checkpoint to resume from, and how a signal stops all towers.

All towers learn of the signal through :class:`towers.collectives.agreement.StepRequests`. A second signal has its
default effect, which also ends a process that does not return to Python code.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NoReturn

import torch

from mirrored.checkpoint.errors import CheckpointError, Preempted, TrainingStopped
from mirrored.checkpoint.folder import ENDED, STOP, Disk, Folder
from mirrored.checkpoint.manifest import check_name, is_step, name_of
from mirrored.checkpoint.memory import keep_snapshots
from mirrored.checkpoint.restoring import Restored, Restorer
from mirrored.checkpoint.saver import Saver
from mirrored.checkpoint.tracked import TrackedObject, track_all
from mirrored.context import refuse_inside_run
from mirrored.data.dataset import DistributedDataset
from mirrored.interceptor import interceptor
from mirrored.strategy.base import Strategy
from towers.collectives.agreement import StepRequests, agree, announce
from towers.health import failure
from towers.health.failure import EXIT_PREEMPTED, signal_name
from towers.launching.console import leave_terminal
from towers.system.messages import get_logger
from towers.system.timeouts import clock

log = get_logger("mirrored")
_STOP, _SAVE, _FINISH = 1, 2, 4  # requests
_LOOK_EVERY = 10  # steps between two looks for an evaluator's request


class StopSignals:
    """A context that records the first signal. A second signal, or the end of the grace period, ends the process.

    Signals that the parent process ignored stay ignored. Outside the main thread, no signal is handled.

    Args:
        signals: the signals to handle.
        grace: seconds from the first signal to the end of the process, if it has not ended before.

    Attributes:
        is_entered: whether the context is entered.
        received: the first signal, or None.
    """

    def __init__(self, signals: Sequence[signal.Signals], grace: float) -> None:
        self._signals = signals
        self._grace = grace
        self._before: dict[signal.Signals, Any] = {}
        self._timer: threading.Timer | None = None
        self.is_entered = False
        self.received: signal.Signals | None = None

    def __enter__(self) -> StopSignals:
        self.is_entered = True
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}
        self.is_entered = False
        if self._timer is not None:
            self._timer.cancel()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        if self.received == signal.SIGHUP:
            leave_terminal()
        for handled in self._before:  # the default action also ends code that does not return to Python
            signal.signal(handled, signal.SIG_DFL)
        self._timer = threading.Timer(self._grace, self._end)
        self._timer.daemon = True
        self._timer.start()

    def _end(self) -> None:
        assert self.received is not None
        os.write(2, f"mirrored: no step was done {self._grace:g} s after {self.received.name}; ending\n".encode())
        os.kill(os.getpid(), self.received)


class CheckpointManager:
    """Saves the whole state of a run in a folder, and restores it, so that an interrupted run resumes.

    A checkpoint contains the given objects, the random state of every tower and the step. It is written under a
    temporary name, fsynced, and renamed, so every checkpoint in the folder is complete at any time. All towers must
    make the same calls. One tower writes, or one tower per folder if hosts do not share a folder. Every tower writes
    its own parts of models that are sharded (``strategy.shard``), into one folder that all hosts share. A run that
    resumes on the same number of towers (with virtual towers: on any number) and without gradient compression ends with
    the same bits as a run that was not interrupted. Inside ``mirrored verify``, nothing is restored or saved.

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
        strategy: the strategy whose towers save and restore together.
        folder: is created if it does not exist. Only one run at a time may write there.
        objects: by name: models, optimizers, schedulers, scalers, distributed datasets, metrics, and other objects with
            ``state_dict`` and ``load_state_dict``; dicts and lists of such objects; dicts and lists of numbers, strings
            and tensors, which are restored in place.
        keep: the number of newest steps to keep, at least 2. Named checkpoints are always kept.
        every_steps: the number of steps between saves by :meth:`step`.
        every_seconds: the number of seconds between saves by :meth:`step`.
        memory_every_steps: the number of steps between snapshots by :meth:`step` in the memory of each host's agent. A
            step that is saved to disk needs no snapshot. A job that restarts after a failure (``restarts=``) resumes
            from the newest checkpoint or snapshot.
        asynchronous: whether :meth:`step` and :meth:`save` return while a copy of the state is still being written. The
            next save waits for it. The copy needs as much memory as the state, on the tower that writes.
        grace_seconds: seconds after a signal in which the step must end and be saved; see :meth:`resume`.
        signals: the signals that request a stop.
        disk: replaces access to the disk in tests.

    Attributes:
        steps: the number of steps, including those before a restart.
        stalled_seconds: the time for which successful saves blocked training, without calls of :meth:`wait`.

    Raises:
        ValueError: a name or a number is invalid.
        TypeError: an object has no state that can be saved.
        DisagreementError: on all towers: their settings differ, such as a folder that is named after the time.
        CheckpointError: on all towers: the folder is not writable, or another run writes there.
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
        settings: dict[str, Any] = {
            "folder": os.fspath(folder),
            "objects": sorted(map(str, objects)),
            "keep": keep,
            "every_steps": every_steps,
            "every_seconds": every_seconds,
            "memory_every_steps": memory_every_steps,
            "asynchronous": asynchronous,
            "grace_seconds": grace_seconds,
            "signals": sorted(map(int, signals)),
        }
        agree(self._comm, "mirrored.CheckpointManager", settings)
        local = strategy.engine.local
        is_mirrored = strategy.is_mirrored if local is None else lambda parameter: False  # not between synchronisations
        tracked = [
            *track_all(objects, is_mirrored),
            *([TrackedObject("mirrored.local", local)] if local is not None else []),
            TrackedObject("mirrored.strategy", strategy),
            TrackedObject("mirrored.streams", strategy.streams),
        ]
        trains = any(isinstance(target, torch.optim.Optimizer) for target in objects.values())  # else: weights alone
        self._data = [target for target in objects.values() if isinstance(target, DistributedDataset)]
        self._reminders = {"gradients", *(["data"] if trains and not self._data else [])}
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
        """Counts a step of training, saves if a checkpoint is due, and stops after a signal. Call it after each step.

        Raises:
            Preempted: a tower received SIGTERM, SIGINT or SIGHUP. The step is saved, and the program ends with exit
                code 75.
            TrainingStopped: an evaluator requested an early stop. The step is saved. :meth:`resume` catches the
                exception.
            CheckpointError: see :meth:`save`.
        """
        refuse_inside_run("CheckpointManager.step()", "call it after run has returned")
        self.steps += 1
        health = self._strategy.health
        ends_step = health.counted_by_script  # otherwise, the end of the run was the end of the step
        health.count(self.steps)
        if ends_step:
            self._strategy.events.end_step()
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
        """Saves the current state. All towers must call it.

        Args:
            name: a name for this checkpoint, such as "best". Default: the name of the step.
            wait: whether to return only when the checkpoint is on disk. Default: True unless ``asynchronous``.

        Raises:
            ValueError: ``name`` is not a valid name; or, on all towers, the towers are at different steps.
            TypeError: on all towers: an object cannot be saved.
            MirrorError: on all towers: their parameters or optimizer states differ. (Not with
                ``mirror_check_interval=None``.)
            CheckpointError: on all towers: writing the previous checkpoint failed, and this one was not started; or,
                with ``wait``, writing this one failed: for example, the name is that of a folder of yours, or another
                manager of this script saves into the same folder. Without ``wait``, the next :meth:`save`,
                :meth:`wait` or the end of :meth:`resume` raises the error. Earlier checkpoints are unchanged.
            DisagreementError: on all towers: some make another call.
        """
        refuse_inside_run("CheckpointManager.save()", "call it after run has returned")
        if name is not None and is_step(check_name(name)):
            raise ValueError(f"a checkpoint's name is {name!r}, which is that of a step; choose another")
        chosen = name if name is not None else name_of(self.steps)
        started = clock.monotonic()
        self._remind()
        wait = not self._asynchronous if wait is None else wait
        self._strategy.events.saving(chosen)
        with self._strategy.health.during(f"saving checkpoint {chosen}"), self._noting_failure():
            self._saver.save(chosen, self.steps, wait=wait)
        self._strategy.events.saved(chosen)
        if name is None:
            self._saved_step = self.steps
        self._saved_at, self._requested_save = clock.monotonic(), False
        self.stalled_seconds += self._saved_at - started

    def wait(self) -> None:
        """Returns when no checkpoint is being written. All towers must call it.

        Raises:
            CheckpointError: on all towers: writing a checkpoint failed.
        """
        with self._noting_failure():
            self._saver.wait()

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        """Counts no step as saved after an error, on all towers."""
        try:
            yield
        except CheckpointError:
            self._saved_step = None
            raise

    def _remind(self) -> None:
        """Logs once which state is not saved."""
        if "data" in self._reminders and self._comm.index == 0:
            log.info(
                "the saved objects include no distributed dataset: a resumed run starts its data from the beginning"
            )
        self._reminders.discard("data")
        if "gradients" in self._reminders and self._strategy.engine.averager.unsynced():
            self._reminders.discard("gradients")
            log.warning(
                "step %d is saved without the gradients that no_sync() has accumulated, so a run that resumes "
                "from it loses them: call CheckpointManager.step() only after optimizer.step()",
                self.steps,
            )

    @contextlib.contextmanager
    def resume(self) -> Iterator[Restored | None]:
        """Resumes from the newest checkpoint that all towers have, or starts from the beginning, and saves at the end.

        Inside the block, after the first SIGTERM, SIGINT or SIGHUP on any tower, all towers finish the same step, save,
        and end with exit code 75. A second signal, or the end of ``grace_seconds``, ends the program at once. Only
        :meth:`step` stops the run. If an evaluator stops the training early, :meth:`step` leaves the block on all
        towers, and the script continues after it.

        Yields the restored checkpoint, or None if there is none.

        Raises:
            CheckpointError: on all towers: there are checkpoints, but none is intact on all towers; or the newest does
                not fit the objects of this run.
        """
        with self._signals, self._saver.training():
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
        """The seconds that this tower needed to write the newest checkpoint; 0 if another tower writes."""
        return self._saver.written_seconds

    @property
    def latest(self) -> str | None:
        """The name of the newest checkpoint of a step in this tower's folder."""
        steps = self._folder.steps()
        return name_of(steps[-1]) if steps else None

    def restore_newest(self) -> Restored | None:
        """Restores the newest checkpoint that is intact on all towers, and returns it, or None if there is none.

        Raises:
            CheckpointError: see :meth:`resume`.
        """
        refuse_inside_run("CheckpointManager.restore_newest()", "restore before the training")
        self._strategy.health.record.set_restores()
        self.wait()
        snapshot = None if self._snapshots is None else self._snapshots.newest()
        restored = self._restorer.restore_newest(snapshot)
        return None if restored is None else self._continue_from(restored)

    def restore(self, name: str) -> Restored:
        """Restores a checkpoint of this folder by its name. All towers must call it.

        Raises:
            ValueError: ``name`` is not a valid name.
            CheckpointError: on all towers: it is damaged, or does not fit. No object has changed.
        """
        refuse_inside_run("CheckpointManager.restore()")
        check_name(name)
        self.wait()
        return self._continue_from(self._restorer.restore(name))

    def _continue_from(self, restored: Restored) -> Restored:
        self.steps = restored.step
        for data in self._data:
            data.hints_at_epochs = True
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
        """Ends all towers together, after saving."""
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
