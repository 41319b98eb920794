"""A ``fit`` that an evaluator stops early: run by ``launch``, on every tower."""

from __future__ import annotations

import pathlib

import keras

import mirrored.keras
from mirrored.checkpoint.folder import STOP
from tests.keras.behaviours import begin
from tests.keras.cases import dense, seven_batches


def fit_that_an_evaluator_stops(folder: str) -> list[int]:
    """The steps and epochs of seven batches that are done when the evaluator has asked in the first epoch."""
    strategy = begin()
    checkpoints = mirrored.keras.Checkpoints(folder)
    note = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: pathlib.Path(folder, STOP).write_text("enough"))
    settings = {"batch_size": 16, "epochs": 9, "callbacks": [checkpoints, note], "verbose": 0}
    history = dense(strategy).fit(*seven_batches(), **settings)
    return [checkpoints.manager.steps, len(history.epoch)]
