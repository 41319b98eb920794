"""A script that fits a Keras model; the lines of a document call fit."""

import mirrored.keras  # isort: split

import keras
import numpy as np

strategy = mirrored.MirroredStrategy(seed=0)
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((20,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
x = np.random.normal(size=(100, 20)).astype("float32")
y = x[:, :3].argmax(1)

# The document's lines come here.

assert len(history.history["loss"]) == 3
