"""Checkpoints of ``fit``, from which a run goes on in the middle of an epoch.

[Note: the place in an epoch] Data adapters of Keras have no place that could be saved. So what is saved is how the
generators stood when the epoch began, and how many batches are done. A run that is resumed begins the epoch with these
generators, which gives the same order, reads the batches that are done without using them, and goes on with the
generators as they stood at the checkpoint.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import keras
import numpy as np

from mirrored import generators
from mirrored.checkpoint import CheckpointManager
from mirrored.checkpoint.errors import TrainingStopped
from mirrored.data.dataset import DistributedDataset
from mirrored.keras import data
from mirrored.keras.keras_private import set_first_epoch
from mirrored.keras.training import Training

State = dict[str, Any]


def state_of(optimizer: Any) -> State:
    """The variables of a Keras optimizer, by name.

    Raises:
        ValueError: it has none yet.
    """
    if not optimizer.built:
        raise ValueError(
            f"{type(optimizer).__name__} has no variables yet, which a checkpoint could hold: call "
            "optimizer.build(model.trainable_variables) first"
        )
    return {variable.path: variable.value.detach() for variable in optimizer.variables}


def set_state_of(optimizer: Any, state: State) -> None:
    """Give a Keras optimizer a state of :func:`state_of`.

    Raises:
        ValueError: it is one of another optimizer.
    """
    variables = {variable.path: variable for variable in optimizer.variables}
    if different := sorted(variables.keys() ^ state.keys()):
        raise ValueError(f"the optimizer's variables are others than in the checkpoint: {', '.join(different[:3])}")
    for name, variable in variables.items():
        variable.assign(state[name])


keras.optimizers.Optimizer.state_dict = state_of
keras.optimizers.Optimizer.load_state_dict = set_state_of


class Checkpoints(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves the whole state of ``fit`` in a folder; the same script, started again, goes on from the newest.

    As ``keras.callbacks.BackupAndRestore``, but in the middle of an epoch, and to the weights of the run that was not
    interrupted: model, optimizer, metrics, callbacks (their numbers, texts, lists and arrays), random numbers of every
    tower, and the place in the data. Files are written while training goes on. On SIGTERM, SIGINT and SIGHUP the towers
    finish their batch, save, and end with exit code 75 (:class:`mirrored.CheckpointManager`). Data of a Python
    generator, which cannot begin again, is refused.

    Args:
        folder: is made when it is missing. One run at a time writes there.
        every_steps: saves after so many batches; default: when the run ends, or a signal asks for it.
        every_seconds: saves when so much time has passed.
        memory_every_steps: keeps a snapshot in memory after so many batches, for jobs with ``restarts``.
        keep: how many of the newest are kept, at least 2.

    Attributes:
        manager: the :class:`mirrored.CheckpointManager`, during ``fit``.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        every_steps: int | None = None,
        every_seconds: float | None = None,
        memory_every_steps: int | None = None,
        keep: int = 2,
    ) -> None:
        super().__init__()
        self._folder = folder
        self._settings: dict[str, Any] = {
            "every_steps": every_steps,
            "every_seconds": every_seconds,
            "memory_every_steps": memory_every_steps,
            "keep": keep,
        }
        self._stack: contextlib.ExitStack | None = None
        self.manager: CheckpointManager | None = None
        self._resumes = False

    def begin(self, model: Any, training: Training, x: Any, callbacks: list[Any], stack: contextlib.ExitStack) -> None:
        """``fit`` begins.

        Args:
            x: its data.
            callbacks: the others.
            stack: is left when ``fit`` ends, whatever ends it.
        """
        dataset = data.distributed(training.strategy, x) if isinstance(x, data.LOADERS) else None
        self._progress = _Progress(model, training, dataset, callbacks)
        self._stack = stack

    def on_train_begin(self, logs: Any = None) -> None:
        if self._stack is None:
            raise RuntimeError(
                "mirrored.keras.Checkpoints was given to the fit of a model that belongs to no strategy: make the "
                "model inside 'with strategy.scope():'"
            )
        objects = {"model": self.model, "optimizer": self.model.optimizer, "fit": self._progress}
        self.manager = CheckpointManager(self._progress.training.strategy, self._folder, objects, **self._settings)
        if self._stack.enter_context(self.manager.resume()) is not None:
            self._resumes = True
            set_first_epoch(self.model, self._progress.epoch)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        if self._resumes:
            self._resumes = False
            self._progress.go_on()
        else:
            self._progress.begin_epoch(epoch)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._progress.batch = batch + 1
        assert self.manager is not None
        try:
            self.manager.step()
        except TrainingStopped:
            self.model.stop_training = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._progress.epoch, self._progress.batch, self._progress.place = epoch + 1, 0, None

    def on_train_end(self, logs: Any = None) -> None:
        if self._resumes:  # there was nothing left to do
            self._progress.show_history()
        set_first_epoch(self.model, None)


class _Progress:
    """What of ``fit`` is neither model nor optimizer.

    Attributes:
        epoch, batch: how many are done, batches of the current epoch.
        place: the states of the generators when the epoch began; None between epochs.
    """

    def __init__(
        self, model: Any, training: Training, dataset: DistributedDataset | None, callbacks: list[Any]
    ) -> None:
        self._model = model
        self.training = training
        self._dataset = dataset
        self._callbacks = callbacks
        self.epoch = self.batch = 0
        self.place: State | None = None
        self._data: State | None = None
        self._metrics: State = {}
        self._history: State = {}

    def begin_epoch(self, epoch: int) -> None:
        """An epoch begins."""
        self.epoch, self.batch = epoch, 0
        self.place = generators.state(self.training.strategy.device)
        if self._dataset is not None:
            state = self._dataset.state_dict()
            if state["step"]:  # of the epoch before
                state = {"seed": state["seed"], "epoch": state["epoch"] + 1, "step": 0, "data": state["data"]}
            self._data = state

    def go_on(self) -> None:
        """The epoch begins in which the checkpoint was saved; see [Note: the place in an epoch]."""
        for variable in self._model.metrics_variables:
            if variable.path in self._metrics:
                variable.assign(self._metrics[variable.path])
        self.show_history()
        if self.place is None:
            self.begin_epoch(self.epoch)
            return
        device = self.training.strategy.device
        now = generators.take(device)
        generators.put(generators.read(self.place, device), device)
        if self._dataset is not None and self._data is not None:
            self._dataset.load_state_dict(self._data)
        assert data.running is not None
        data.running.skip = self.batch, lambda: generators.put(now, device)

    def show_history(self) -> None:
        """Let the model's history be that of the whole run; Keras' callback has begun another one."""
        vars(self._model.history).update(self._history)

    def state_dict(self) -> State:
        """All towers call it."""
        if self.training.several:
            self.training.reduce()
        return {
            "epoch": self.epoch,
            "batch": self.batch,
            "place": self.place,
            "data": self._data,
            "metrics": {variable.path: variable.value.detach() for variable in self._model.metrics_variables},
            "callbacks": [[type(callback).__name__, _simple(vars(callback))] for callback in self._callbacks],
            "history": _simple(vars(self._model.history)),
        }

    def load_state_dict(self, state: State) -> None:
        self.epoch, self.batch, self.place = state["epoch"], state["batch"], state["place"]
        self._data, self._metrics, self._history = state["data"], state["metrics"], state["history"]
        here = [type(callback).__name__ for callback in self._callbacks]
        if (saved := [name for name, _ in state["callbacks"]]) != here:
            raise ValueError(f"the callbacks are {', '.join(here)} here, and {', '.join(saved)} in the checkpoint")
        for callback, (_, attributes) in zip(self._callbacks, state["callbacks"], strict=True):
            vars(callback).update(attributes)


# min_delta: Keras turns its sign when a callback first compares, which it does once more in a run that is resumed.
_NOT_STATE = {"params", "_model", "verbose", "validation_data", "min_delta"}


def _simple(attributes: State) -> State:
    """The attributes of an object that are numbers, texts, arrays, and lists and dicts of these."""
    return {name: value for name, value in attributes.items() if name not in _NOT_STATE and _is_simple(value)}


def _is_simple(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(_is_simple, value))
    if isinstance(value, dict):
        return type(value) is dict and all(isinstance(key, str) and _is_simple(each) for key, each in value.items())
    return value is None or isinstance(value, (bool, int, float, str, np.ndarray, np.generic))
