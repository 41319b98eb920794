"""TensorBoard's files of ``fit``, written with torch's writer. Keras' callback of that name needs TensorFlow."""

from __future__ import annotations

import os
from typing import Any

import keras


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
