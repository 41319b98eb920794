"""Callbacks on several towers: they decide alike, and files and the progress bar are the chief's.

Every tower runs every callback, with the same logs, so those that decide by the logs decide alike. Keras' callbacks
that write files do everything but write on the other towers. A tower whose callback alone sets ``model.stop_training``
takes the others along: at the end of the epoch, and of each batch where a callback of the script's own follows batches.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import keras

from mirrored.keras.keras_private import CallbackList, first_epoch, write_nothing
from mirrored.keras.monitor import Monitor
from mirrored.keras.saving import read_in_turn
from mirrored.keras.tensorboard import TensorBoard
from mirrored.strategy.base import Strategy
from towers.collectives.agreement import announce
from towers.errors import DisagreementError

_ORBAX: tuple[Any, ...] = tuple(kind for name, kind in vars(keras.callbacks).items() if name == "OrbaxCheckpoint")
_BOARDS = (TensorBoard, keras.callbacks.TensorBoard)
_ONLY_WRITE = (keras.callbacks.CSVLogger, keras.callbacks.RemoteMonitor, *_BOARDS, *_ORBAX)
_OF_KERAS = {base for each in vars(keras.callbacks).values() if isinstance(each, type) for base in each.__mro__}
_BATCH_ENDS = ("on_batch_end", "on_train_batch_end", "on_test_batch_end")


def for_tower(strategy: Strategy, callbacks: Any, fits: bool) -> Any:
    """The callbacks that this tower runs, of those that ``fit`` was given.

    Args:
        fits: whether it is ``fit``, after whose epochs and batches the towers agree on whether to go on.
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
    """Whether a callback may read the logs of each batch. It is asked on any number of towers.

    Raises:
        ImportError: one needs TensorFlow, which is not there.
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
    """Whether a callback of the script's own does something at the end of each batch."""
    kind = type(callback)
    if any(name in vars(callback) for name in _BATCH_ENDS):  # of a LambdaCallback
        return True
    owners = (base for name in _BATCH_ENDS for base in kind.__mro__ if name in vars(base))
    return any(owner not in _OF_KERAS and not issubclass(owner, (Agreement, Monitor)) for owner in owners)


def _restore_in_turn(strategy: Strategy, callback: Any) -> None:
    """Let the chief restore first: it repairs a backup whose writing was interrupted."""

    def on_train_begin(logs: Any = None) -> None:
        with read_in_turn(strategy, "the files that BackupAndRestore reads"):
            type(callback).on_train_begin(callback, logs)

    callback.on_train_begin = on_train_begin


def _mute(callback: Any) -> None:
    """Let a callback of Keras' decide as on the chief, and write nothing; models are saved by the chief anyhow."""
    if type(callback) in _OF_KERAS and hasattr(callback, "verbose"):
        callback.verbose = 0
    if isinstance(callback, (keras.callbacks.BackupAndRestore, keras.callbacks.ModelCheckpoint)):
        write_nothing(callback)


class Agreement(keras.callbacks.Callback):  # type: ignore[misc]
    """Lets towers begin at the same epoch, and stop together.

    Args:
        batches_are_read: whether a callback of the chief's may read the logs of each batch.
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
    """Lets towers stop together after each batch, too."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self._agree()
