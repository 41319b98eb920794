"""The checkpoints of a Keras fit are evaluated like those of any training."""

from __future__ import annotations

import os
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import pytest

import mirrored.keras
from mirrored.evaluation import Evaluator
from tests.support.jobs import towers

pytestmark = pytest.mark.extended


def _evaluated(strategy: mirrored.Strategy, folder: str) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The table, and the metrics of the model as ``fit`` left it."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])
    x = np.linspace(-1, 1, 96, dtype="float32").reshape(32, 3)

    def evaluate() -> dict[str, float]:
        return model.evaluate(x, x[:, :1], verbose=0, return_dict=True)

    checkpoints = mirrored.keras.Checkpoints(folder, every_steps=4)
    model.fit(x, x[:, :1], batch_size=8, epochs=2, verbose=0, callbacks=[checkpoints])
    last = evaluate()
    return Evaluator(strategy, folder, {"model": model}, evaluate).run(), last


def test_the_checkpoints_of_keras_are_evaluated(tmp_path: Any) -> None:
    for rows, last in towers(_evaluated, str(tmp_path)):
        assert [row["step"] for row in rows] == [4, 8]
        assert rows[0]["loss"] > rows[1]["loss"] == pytest.approx(last["loss"])
