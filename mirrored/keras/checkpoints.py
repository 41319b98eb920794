"""Files of Keras models, and checkpoints of ``fit``, from which a run resumes within an epoch.

[Note: files of models] The chief writes, and all towers read. ``model.save``, ``save_weights`` and ``export`` of a
strategy's model write on the chief and do nothing on other towers. So a script calls them as on one device, also in
callbacks. ``model.load_weights``, and ``load_model`` in a scope, wait until all towers have called them, so that the
chief has finished its earlier writes.

[Note: the place in an epoch] Data adapters of Keras have no position that could be saved. A checkpoint therefore
contains the states of the generators at the start of the epoch, and the number of finished batches. A resumed run
starts the epoch with these generators, which gives the same order. It reads the finished batches without using them,
and continues with the generators of the checkpoint.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from mirrored import generators
from mirrored.checkpoint import CheckpointManager
from mirrored.checkpoint.errors import TrainingStopped
from mirrored.context import current_frame, strategy_with_towers
from mirrored.data.dataset import DistributedDataset
from mirrored.keras import data, keras_private
from mirrored.keras.keras_private import around, set_first_epoch
from mirrored.keras.optimizers import show_state
from mirrored.keras.training import Training
from mirrored.strategy.base import Strategy
from towers.collectives.agreement import announce

# min_delta: Keras changes its sign when a callback first compares, and would do so again in a resumed run.
_NOT_STATE = {"params", "_model", "verbose", "validation_data", "min_delta"}

_waits = contextvars.ContextVar("whether the readers of weights wait for all towers", default=True)


def note_strategy(model: Any) -> None:
    """Assigns a new model to the strategy of the current scope, if there is one."""
    frame = current_frame()
    if frame is not None and isinstance(frame.strategy, Strategy):
        keras_private.attach(model, "strategy", frame.strategy)


def strategy_of(model: Any) -> Strategy | None:
    """Returns the strategy in whose scope a model was created, or that mirrors it."""
    made_in: Strategy | None = keras_private.attached(model, "strategy")
    if made_in is not None:
        return made_in
    strategy = strategy_with_towers()
    if not isinstance(strategy, Strategy) or not model.built:
        return None
    variables = model.trainable_variables
    return strategy if variables and all(strategy.engine.recorder.knows(v.value) for v in variables) else None


@around(keras.Model, "save", "save_weights", "export")
def _write(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Writes a file on the chief only."""
    strategy = strategy_of(model)
    if strategy is not None and original.__name__ != "export":
        show_state(model.optimizer)
    if strategy is None or strategy.is_chief:
        return original(model, *args, **kwargs)
    return None


@around(keras.models, "load_model")
@around(keras.saving, "load_model")
def _load_model(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Waits, in a scope, until the chief has finished its earlier writes."""
    frame = current_frame()
    if frame is not None and frame.replica is None and frame.strategy.num_replicas_in_sync > 1:
        announce(frame.strategy.communicator, "keras.models.load_model()")
    return original(*args, **kwargs)


@contextlib.contextmanager
def read_in_turn(strategy: Strategy, call: str) -> Iterator[None]:
    """Runs the block on the chief first, then on the other towers. ``load_weights`` does not wait inside.

    Raises:
        TypeError, ValueError: on all towers: the chief failed.
    """
    token = _waits.set(False)
    try:
        if not strategy.is_chief:
            announce(strategy.communicator, call)
        try:
            yield
        except Exception as error:
            if strategy.is_chief:
                announce(strategy.communicator, call, error=error)
            raise
        if strategy.is_chief:
            announce(strategy.communicator, call)
    finally:
        _waits.reset(token)


@around(keras.Model, "load_weights")
def _load_weights(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    strategy = strategy_of(model)
    if strategy is not None and strategy.num_replicas_in_sync > 1 and _waits.get():
        announce(strategy.communicator, "model.load_weights()")
    return original(model, *args, **kwargs)


State = dict[str, Any]


def state_of(optimizer: Any) -> State:
    """Returns the variables of a Keras optimizer, by name.

    Raises:
        ValueError: it has no variables yet.
    """
    if not optimizer.built:
        raise ValueError(
            f"{type(optimizer).__name__} has no variables yet, which a checkpoint could hold: call "
            "optimizer.build(model.trainable_variables) first"
        )
    return {variable.path: variable.value.detach() for variable in optimizer.variables}


def set_state_of(optimizer: Any, state: State) -> None:
    """Sets the state of a Keras optimizer to a result of :func:`state_of`.

    Raises:
        ValueError: the state belongs to another optimizer.
    """
    variables = {variable.path: variable for variable in optimizer.variables}
    if different := sorted(variables.keys() ^ state.keys()):
        raise ValueError(f"the optimizer's variables are others than in the checkpoint: {', '.join(different[:3])}")
    for name, variable in variables.items():
        variable.assign(state[name])


keras.optimizers.Optimizer.state_dict = state_of
keras.optimizers.Optimizer.load_state_dict = set_state_of


class Checkpoints(keras.callbacks.Callback):  # type: ignore[misc]
    """Saves the whole state of ``fit`` in a folder. If the same script is run again, it resumes from the newest state.

    It works like ``keras.callbacks.BackupAndRestore``, but also within an epoch, and ends with the weights of a run
    without interruption. The state is the model, the optimizer, metrics, callbacks (their numbers, strings, lists and
    arrays), the random numbers of every tower, and the position in the data. Files are written while training
    continues. On SIGTERM, SIGINT and SIGHUP, the towers finish their batch, save, and end with exit code 75
    (:class:`mirrored.CheckpointManager`). Data from a Python generator, which cannot start again, is refused.

    Args:
        folder: is created if it does not exist. Only one run at a time may write there.
        every_steps: the number of batches between saves. By default, it saves only at the end of the run or after a
            signal.
        every_seconds: the number of seconds between saves.
        memory_every_steps: the number of batches between snapshots in memory, for jobs with ``restarts``.
        keep: the number of newest checkpoints to keep, at least 2.

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
        """Prepares the callback at the start of ``fit``.

        Args:
            x: the data of ``fit``.
            callbacks: the other callbacks.
            stack: is closed when ``fit`` ends, with or without an exception.
        """
        dataset = data.distributed(training.strategy, x) if data.loads_shares(x) else None
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
        if self._resumes:  # no batch was left
            self._progress.show_history()
        set_first_epoch(self.model, None)


class _Progress:
    """The state of ``fit`` except model and optimizer.

    Attributes:
        epoch, batch: the number of finished epochs, and of finished batches of the current epoch.
        place: the states of the generators at the start of the epoch; None between epochs.
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
        """Records the start of an epoch."""
        self.epoch, self.batch = epoch, 0
        self.place = generators.state(self.training.strategy.device)
        if self._dataset is not None:
            state = self._dataset.state_dict()
            if state["step"]:  # the state of the previous epoch
                state = {"seed": state["seed"], "epoch": state["epoch"] + 1, "step": 0, "data": state["data"]}
            self._data = state

    def go_on(self) -> None:
        """Resumes the epoch in which the checkpoint was saved; see [Note: the place in an epoch]."""
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
        """Replaces the model's history, which Keras' callback has restarted, by the history of the whole run."""
        vars(self._model.history).update(self._history)

    def state_dict(self) -> State:
        """Returns the state. All towers must call it."""
        if self.training.defers:
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
            now, before = (", ".join(names) or "none" for names in (here, saved))
            raise ValueError(f"the callbacks of fit are {now} here, and {before} in the checkpoint")
        for callback, (_, attributes) in zip(self._callbacks, state["callbacks"], strict=True):
            vars(callback).update(attributes)


def _simple(attributes: State) -> State:
    """Returns the attributes of an object that are numbers, strings, arrays, and lists and dicts of these."""
    return {name: value for name, value in attributes.items() if name not in _NOT_STATE and _is_simple(value)}


def _is_simple(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(_is_simple, value))
    if isinstance(value, dict):
        return type(value) is dict and all(isinstance(key, str) and _is_simple(each) for key, each in value.items())
    return value is None or isinstance(value, (bool, int, float, str, np.ndarray, np.generic))
