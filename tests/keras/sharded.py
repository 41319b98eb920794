"""Keras with a sharded optimizer and in central storage, except its numbers: run by ``launch`` on every tower."""

from __future__ import annotations

import os
import pathlib
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch
from keras import layers

import mirrored.keras
from tests.keras.cases import classes, in_float64, numbers
from tests.support.jobs import Settings, strategy_of
from towers.sharding.optimizer import OptimizerSharder


def make(strategy: mirrored.Strategy, optimizer: Any = None, hidden: int = 500) -> keras.Model:
    """A built classifier of 8 numbers."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = keras.Sequential([layers.Input((8,)), layers.Dense(hidden, "relu"), layers.Dense(3, "softmax")])
        model.compile(optimizer or keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
    return model


def train(model: keras.Model, epochs: int = 1, **settings: Any) -> None:
    model.fit(numbers(8), classes(), batch_size=16, epochs=epochs, shuffle=False, verbose=0, **settings)


def values(optimizer: Any) -> dict[str, np.ndarray]:
    return {variable.path: np.array(variable.numpy()) for variable in optimizer.variables}


def memory(settings: Settings) -> tuple[int, int, int]:
    """Bytes of the variables of Keras' optimizer, of this tower's state, and of the model."""
    strategy = strategy_of(settings)
    model = make(strategy)
    train(model)
    own = sum(
        value.untyped_storage().nbytes()
        for variable in model.optimizer.variables
        if (value := vars(variable)["_value"]) is not None
    )
    sharder = strategy.engine.attached(OptimizerSharder)
    assert sharder is not None
    (inner,) = list(sharder._inner)
    shards = sum(value.nbytes for state in inner.state.values() for value in state.values())
    return own, shards, sum(variable.value.nbytes for variable in model.variables)


def saved(folder: str, settings: Settings, hosts: str) -> dict[str, Any]:
    """The variables of the optimizer, read and from files; the state that continues from files and checkpoints."""
    if hosts:
        os.environ["NCCL_HOSTID"] = hosts[int(os.environ["RANK"])]
    strategy = strategy_of(settings)
    model = make(strategy)
    best = keras.callbacks.ModelCheckpoint(f"{folder}/best.keras", monitor="loss", save_best_only=True)
    backup = keras.callbacks.BackupAndRestore(f"{folder}/backup")
    train(model, callbacks=[best, backup])
    found = {"read": values(model.optimizer)}
    model.save(f"{folder}/model.keras")
    model.save_weights(f"{folder}/model.weights.h5")
    train(model)
    found["continued"] = values(model.optimizer)
    weights = model.get_weights()
    for name in ("model.keras", "best.keras"):
        with strategy.scope():
            loaded = keras.models.load_model(f"{folder}/{name}")
        found[f"of {name}"] = values(loaded.optimizer)
        train(loaded)
        found[f"continued from {name}"] = values(loaded.optimizer)
        for one, other in zip(loaded.get_weights(), weights, strict=True):
            np.testing.assert_array_equal(one, other)
    train(model)
    model.load_weights(f"{folder}/model.weights.h5")  # written over a state that is sharded
    train(model)
    found["continued from model.weights.h5"] = values(model.optimizer)
    return found


def resumed(folder: str, settings: Settings) -> list[np.ndarray]:
    """Weights and state after three epochs, the last of which continue from a checkpoint if there is one."""
    strategy = strategy_of(settings)
    model = make(strategy)
    checkpoints = [mirrored.keras.Checkpoints(folder, every_steps=3)] if folder else []
    if folder and not pathlib.Path(folder).exists():
        train(model, callbacks=checkpoints)
        model = make(strategy)
    train(model, 3, callbacks=checkpoints)
    return [*model.get_weights(), *values(model.optimizer).values()]


def averaged(settings: Settings) -> list[np.ndarray]:
    """Weights of ``use_ema``, which ``fit`` puts into the model at its end, and those of ``SwapEMAWeights``."""
    in_float64()
    strategy = strategy_of(settings)
    found = []
    for callbacks in ([], [keras.callbacks.SwapEMAWeights(swap_on_epoch=True)]):
        model = make(strategy, keras.optimizers.SGD(0.5, momentum=0.9, use_ema=True, ema_momentum=0.9))
        train(model, 2, callbacks=callbacks)
        found += model.get_weights()
    return found


def constrained(settings: Settings) -> list[np.ndarray]:
    """Weights with a constraint; with weight decay that leaves the biases out; in mixed precision."""
    in_float64()
    strategy = strategy_of(settings)
    found = []
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    for each in (keras.optimizers.Adam(0.1), optimizer, keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))):
        model = make(strategy, each)
        model.layers[0].kernel.constraint = keras.constraints.MaxNorm(0.5)
        train(model, 2)
        found += [*model.get_weights(), *values(model.optimizer).values()]
    return found


def error_of(optimizer: str) -> str:
    """What a tower says to an optimizer that does not update each element for itself."""
    model = make(mirrored.MirroredStrategy(shard_optimizer=True), getattr(keras.optimizers, optimizer)())
    try:
        train(model)
    except mirrored.MirrorError as error:
        return str(error)
    return ""


def one_tower_reads(settings: Settings) -> tuple[float, bool]:
    """The chief reads the state alone, and training continues."""
    strategy = strategy_of(settings)
    model = make(strategy)
    train(model)
    total = sum(float(np.abs(value).sum()) for value in values(model.optimizer).values()) if strategy.is_chief else 0.0
    train(model)
    return total, all(bool(torch.isfinite(variable.value).all()) for variable in model.variables)
