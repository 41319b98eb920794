"""Keras' ``compile`` and ``fit`` on the digits: python fit.py STRATEGY FOLDER EXAMPLES."""

import json
import sys

from sklearn.datasets import load_digits

import mirrored.keras  # noqa: F401  # before keras: it chooses Keras' torch backend

# isort: split
import keras

from tests.matrix.strategies import batches_per_step, strategy_of

strategy, batches, examples = strategy_of(sys.argv[1]), batches_per_step(sys.argv[1]), int(sys.argv[3])
keras.utils.set_random_seed(0)
images, labels = load_digits(return_X_y=True)
images = images / 16

with strategy.scope():
    model = keras.Sequential(
        [keras.layers.Input((64,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10, "softmax")]
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(
    images[:examples],
    labels[:examples],
    batch_size=64 // batches,
    epochs=3,
    validation_data=(images[examples:], labels[examples:]),
    verbose=0,
)
if strategy.is_chief:
    print("losses", json.dumps(history.history["loss"] + history.history["val_loss"]))
