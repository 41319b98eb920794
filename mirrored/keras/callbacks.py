"""Callbacks on several towers: a monitor, TensorBoard's files, and Keras' own, which decide identically on every tower.

:class:`TensorBoard` uses torch's writer; Keras' callback of that name needs TensorFlow.

Every tower runs every callback with the same logs, so callbacks that decide by the logs decide identically. On other
towers than the chief, Keras' callbacks that write files do everything except writing. If a callback sets
``model.stop_training`` on only one tower, all towers stop at the end of the epoch. If a custom callback follows
batches, they stop at the end of the batch.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

import keras

from mirrored import monitor
from mirrored.keras.checkpoints import read_in_turn, strategy_of
from mirrored.keras.keras_private import CallbackList, first_epoch, write_nothing
from mirrored.keras.training import Training
from mirrored.strategy.base import Strategy
from towers.collectives.agreement import announce
from towers.errors import DisagreementError


class Monitor(keras.callbacks.Callback):  # type: ignore[misc]
    """Follows ``fit`` with a :class:`mirrored.Monitor`.

    The loss is the mean since the start of the epoch, as in Keras' progress bar. Disable one of the two displays, with
    ``show=False`` or ``fit(verbose=2)``.

    Args:
        every: the number of batches between reports.
        settings: the other arguments of :class:`mirrored.Monitor`, except ``total`` and ``loss``.

    Attributes:
        monitor: the :class:`mirrored.Monitor` of the last ``fit``.
    """

    def __init__(self, every: int = 50, **settings: Any) -> None:
        super().__init__()
        self._settings = {"every": every, **settings}
        self.monitor: monitor.Monitor | None = None
        self.training: Training | None = None  # fit sets it

    def on_train_begin(self, logs: Any = None) -> None:
        strategy = strategy_of(self.model)
        if strategy is None:
            raise RuntimeError(
                "mirrored.keras.Monitor was given to the fit of a model that belongs to no strategy: make the model "
                "inside 'with strategy.scope():'"
            )
        if self.monitor is not None:  # from a fit that was interrupted
            self.monitor.stop()
        total = (self.params["steps"] or 0) * self.params["epochs"] or None
        self.monitor = made = monitor.Monitor(strategy, total=total, loss="mean", **self._settings)
        if self.training is not None:
            self.training.is_read = lambda: made.is_due

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        assert self.monitor is not None
        share = self.training.newest_share if self.training is not None else None
        loss = (logs or {}).get("loss") if self.monitor.is_due else None  # otherwise, it may be an older batch's
        self.monitor.step(loss, examples=share.total if share is not None else None)

    def on_train_end(self, logs: Any = None) -> None:
        if self.monitor is not None:
            self.monitor.close()
        if self.training is not None:
            self.training.is_read = lambda: False


class TensorBoard(keras.callbacks.Callback):  # type: ignore[misc]
    """Writes the logs of ``fit`` for ``tensorboard --logdir``, on the chief.

    Folders and names are those of ``keras.callbacks.TensorBoard``: ``train`` and ``validation``, ``epoch_loss`` and
    ``epoch_learning_rate`` by epochs, ``batch_loss`` by batches.

    Args:
        log_dir: is created if it does not exist.
        histogram_freq: the number of epochs between histograms of all weights; 0 for none.
        update_freq: ``"epoch"``, ``"batch"``, or the number of batches between additional writes of the logs.

    Raises:
        ModuleNotFoundError: tensorboard is not installed.
    """

    def __init__(
        self, log_dir: str | os.PathLike[str] = "logs", histogram_freq: int = 0, update_freq: str | int = "epoch"
    ) -> None:
        super().__init__()
        from torch.utils.tensorboard import SummaryWriter  # slow, and needs an optional package

        self._new_writer = SummaryWriter
        self._log_dir = os.fspath(log_dir)
        self._histogram_freq = histogram_freq
        self.update_freq = 1 if update_freq == "batch" else update_freq
        self._writers: dict[str, Any] = {}
        self._batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._batches += 1
        if isinstance(self.update_freq, int) and self._batches % self.update_freq == 0:
            self._write("batch_", logs or {}, self._batches)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        rate = keras.ops.convert_to_tensor(self.model.optimizer.learning_rate)
        self._write("epoch_", {**(logs or {}), "learning_rate": rate}, epoch)
        if self._histogram_freq and epoch % self._histogram_freq == 0:
            for variable in self.model.weights:
                self._writer("train").add_histogram(variable.path, variable.value.detach().cpu(), epoch)

    def on_train_end(self, logs: Any = None) -> None:
        while self._writers:
            self._writers.popitem()[1].close()

    def _write(self, kind: str, logs: dict[str, Any], step: int) -> None:
        for name, value in logs.items():
            writer = self._writer("validation" if name.startswith("val_") else "train")
            writer.add_scalar(kind + name.removeprefix("val_"), float(value), step)

    def _writer(self, folder: str) -> Any:
        if folder not in self._writers:
            self._writers[folder] = self._new_writer(os.path.join(self._log_dir, folder))
        return self._writers[folder]


_ORBAX: tuple[Any, ...] = tuple(kind for name, kind in vars(keras.callbacks).items() if name == "OrbaxCheckpoint")
_BOARDS = (TensorBoard, keras.callbacks.TensorBoard)
_ONLY_WRITE = (keras.callbacks.CSVLogger, keras.callbacks.RemoteMonitor, *_BOARDS, *_ORBAX)
_OF_KERAS = {base for each in vars(keras.callbacks).values() if isinstance(each, type) for base in each.__mro__}
_BATCH_ENDS = ("on_batch_end", "on_train_batch_end", "on_test_batch_end")


def for_tower(strategy: Strategy, callbacks: Any, fits: bool) -> Any:
    """Returns the callbacks that this tower runs.

    Args:
        callbacks: the callbacks of the script.
        fits: whether they are for ``fit``, after whose epochs and batches the towers agree on whether to continue.
    """
    listed = _listed(callbacks)
    chosen = [callback for callback in listed if strategy.is_chief or not isinstance(callback, _ONLY_WRITE)]
    for callback in chosen:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            _restore_in_turn(strategy, callback)
        if not strategy.is_chief:
            _mute(callback)
    if fits and not any(isinstance(callback, Agreement) for callback in listed):
        kind = AgreementInBatches if any(_follows_batches(callback) for callback in listed) else Agreement
        chosen.append(kind(strategy, read_batches(listed)))
        if isinstance(callbacks, CallbackList):
            chosen[-1].set_model(callbacks.model)
    if isinstance(callbacks, CallbackList):
        callbacks.callbacks[:] = chosen
        return callbacks
    return chosen


def read_batches(callbacks: Any) -> bool:
    """Returns whether a callback may read the logs of each batch. It is called for any number of towers.

    Raises:
        ImportError: a callback needs TensorFlow, which is not installed.
    """
    listed = _listed(callbacks)
    if any(isinstance(each, keras.callbacks.TensorBoard) for each in listed) and find_spec("tensorflow") is None:
        raise ImportError("keras.callbacks.TensorBoard needs TensorFlow; mirrored.keras.TensorBoard needs tensorboard")
    return any(_reads_batches(callback) for callback in listed)


def _listed(callbacks: Any) -> list[Any]:
    return callbacks.callbacks if isinstance(callbacks, CallbackList) else keras.tree.flatten(callbacks or [])  # type: ignore[no-any-return]


def _reads_batches(callback: Any) -> bool:
    if isinstance(callback, Agreement):
        return callback.batches_are_read
    if isinstance(callback, (keras.callbacks.ModelCheckpoint, *_BOARDS, *_ORBAX)):
        return "epoch" not in (getattr(callback, "save_freq", None), getattr(callback, "update_freq", None))
    if isinstance(callback, keras.callbacks.TerminateOnNaN):
        return True
    return _follows_batches(callback)


def _follows_batches(callback: Any) -> bool:
    """Returns whether a custom callback has a method for the end of each batch."""
    kind = type(callback)
    if any(name in vars(callback) for name in _BATCH_ENDS):  # a LambdaCallback
        return True
    owners = (base for name in _BATCH_ENDS for base in kind.__mro__ if name in vars(base))
    return any(owner not in _OF_KERAS and not issubclass(owner, (Agreement, Monitor)) for owner in owners)


def _restore_in_turn(strategy: Strategy, callback: Any) -> None:
    """Makes the chief restore first, because it repairs a backup that was not written completely."""

    def on_train_begin(logs: Any = None) -> None:
        with read_in_turn(strategy, "the files that BackupAndRestore reads"):
            type(callback).on_train_begin(callback, logs)

    callback.on_train_begin = on_train_begin


def _mute(callback: Any) -> None:
    """Makes a callback of Keras decide as on the chief, but write nothing. Only the chief saves models anyway."""
    if type(callback) in _OF_KERAS and hasattr(callback, "verbose"):
        callback.verbose = 0
    if isinstance(callback, (keras.callbacks.BackupAndRestore, keras.callbacks.ModelCheckpoint)):
        write_nothing(callback)


class Agreement(keras.callbacks.Callback):  # type: ignore[misc]
    """Makes towers start at the same epoch, and stop together.

    Args:
        batches_are_read: whether a callback of the chief may read the logs of each batch.
    """

    def __init__(self, strategy: Strategy, batches_are_read: bool) -> None:
        super().__init__()
        self._strategy = strategy
        self.batches_are_read = batches_are_read

    def on_train_begin(self, logs: Any = None) -> None:
        first = announce(self._strategy.communicator, "the beginning of model.fit", first_epoch(self.model))
        if len(set(first)) > 1:
            raise DisagreementError(
                f"BackupAndRestore resumes at epoch {first[0]} on tower 0, but not on all towers ({first}): its "
                "folder must be on a disk that all hosts share"
            )

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._agree()

    def on_train_end(self, logs: Any = None) -> None:
        announce(self._strategy.communicator, "the end of model.fit")

    def _agree(self) -> None:
        stops = bool(self.model.stop_training)
        towers = announce(self._strategy.communicator, "the end of model.fit's callbacks", stops)
        self.model.stop_training = any(towers)


class AgreementInBatches(Agreement):
    """Makes towers stop together after each batch, too."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._agree()
