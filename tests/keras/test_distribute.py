"""The scenarios of Keras' own tests under tf.distribute, on two towers."""

from __future__ import annotations

import os
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
from keras import layers

import mirrored.keras
from tests.support.jobs import launch


def _variables() -> dict[str, Any]:
    strategy = mirrored.MirroredStrategy()
    with strategy.scope():
        dense = layers.Dense(2)
        dense.build([4, 2])
        inputs = layers.Input(shape=[4])
        model = keras.Model(inputs, layers.Dense(2)(inputs))
        variables = [
            keras.Variable(np.zeros((4, 4)), aggregation=aggregation, synchronization=synchronization)
            for aggregation, synchronization in (("none", "auto"), ("sum", "on_read"))
        ]
        seeds = keras.random.SeedGenerator(42)

    def step() -> Any:
        value = float(mirrored.get_replica_context().replica_id_in_sync_group)
        return model(keras.ops.full((8, 4), value)).detach().numpy()

    return {
        "mirrored": [strategy.is_mirrored(v.value) for v in model.variables],
        "recorded": [v.value in strategy.engine.recorder for v in dense.variables],
        "output": strategy.run(step),
        "kernel": model.layers[-1].kernel.numpy(),
        "ways": [(v.aggregation, v.synchronization) for v in variables],
        "seed": strategy.run(lambda: seeds.state.numpy()).tolist(),
    }


def test_variables_are_mirrored_and_each_tower_has_its_own_output() -> None:
    first, second = launch(_variables)
    np.testing.assert_array_equal(first["kernel"], second["kernel"])
    np.testing.assert_array_equal(first["output"], np.zeros((8, 2)))
    np.testing.assert_allclose(second["output"], np.ones((8, 4)) @ second["kernel"], atol=1e-6)
    assert first["ways"] == second["ways"] == [("none", "auto"), ("sum", "on_read")]
    assert first["seed"] == second["seed"] == [42, 0]


def _batches() -> list[list[tuple[int, ...]]]:
    strategy = mirrored.MirroredStrategy()
    shapes: list[list[tuple[int, ...]]] = []

    class Model(keras.Model):
        def train_step(self, data: Any) -> dict[str, Any]:
            shapes.append([tuple(part.shape) for part in data])
            return super().train_step(data)

    with strategy.scope():
        inputs = layers.Input(shape=(16,))
        model = Model(inputs, layers.Dense(4)(inputs))
        model.compile("sgd", "mse")
    x, y, weight = np.random.random((100, 16)), np.random.random((100, 4)), np.random.random(100)
    model.fit(x, y, sample_weight=weight, batch_size=16, shuffle=True, verbose=0)
    return shapes


def test_batches_are_cut_into_halves() -> None:
    for shapes in launch(_batches):
        assert shapes == [[(8, 16), (8, 4), (8,)]] * 6 + [[(2, 16), (2, 4), (2,)]]
