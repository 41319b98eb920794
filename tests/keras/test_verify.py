"""``mirrored verify`` compares scripts that call Keras' ``fit``."""

from __future__ import annotations

import pathlib

import pytest

from tests.support.commands import run_command
from tests.support.waiting import HANG

SCRIPT = """
import mirrored.keras
import keras
import numpy as np
import mirrored

strategy = mirrored.MirroredStrategy(seed=0)
with strategy.scope(SETTINGS):
    model = keras.Sequential(
        [
            keras.layers.Input((8,)),
            keras.layers.Dense(16),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(3),
        ]
    )
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
x = np.random.normal(size=(103, 8)).astype("float32")
y = x[:, :3].argmax(1)
model.fit(x, y, batch_size=16, epochs=2, verbose=0)
"""


@pytest.mark.parametrize(
    ("settings", "code", "words"),
    [
        ("sync_batch_norm=True", 0, "The same: losses, gradients and parameters are equal"),
        ("", 1, "batch norm (batch_normalization) takes the statistics of each tower's own"),
    ],
)
def test_a_script_is_compared(tmp_path: pathlib.Path, settings: str, code: int, words: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.replace("SETTINGS", settings))
    result = run_command(["mirrored", "verify", str(script)], timeout=HANG)
    said = " ".join(result.stdout.split())
    assert words in said, result.stdout + result.stderr
    assert result.returncode == code
