"""A ``fit`` that a monitor follows."""

from __future__ import annotations

import mirrored.keras  # isort: split

import pathlib
from typing import Any

import keras
import numpy as np

import mirrored


def fit_with_a_monitor(folder: str) -> dict[str, Any]:
    """Two epochs of six batches, the last of which has 3 examples, with a report after every third one."""
    strategy = mirrored.MirroredStrategy(seed=0)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(28, 4)).astype("float32")
    monitor = mirrored.keras.Monitor(3, jsonl=pathlib.Path(folder, "monitor.jsonl"), show=False)
    history = model.fit(x, x[:, :1], batch_size=5, epochs=2, shuffle=False, callbacks=[monitor], verbose=0)
    assert monitor.monitor is not None
    return {"history": history.history["loss"], "steps": monitor.monitor.steps, "report": monitor.monitor.report}
