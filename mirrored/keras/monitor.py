"""A monitor of ``fit``: reports the speed of training, and the slowest tower."""

from __future__ import annotations

from typing import Any

import keras

from mirrored import monitor
from mirrored.keras.saving import strategy_of
from mirrored.keras.training import Training


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
