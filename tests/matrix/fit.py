"""Keras' ``compile`` and ``fit`` on the digits: python fit.py STRATEGY."""

import json
import sys

from sklearn.datasets import load_digits

import mirrored.keras  # noqa: F401  # before keras: it chooses Keras' torch backend

# isort: split
import keras

from tests.matrix.strategies import strategy_of

strategy = strategy_of(sys.argv[1])
keras.utils.set_random_seed(0)
images, labels = load_digits(return_X_y=True)
images = images / 16

with strategy.scope():
    model = keras.Sequential(
        [keras.layers.Input((64,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(10, "softmax")]
    )
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "sparse_categorical_crossentropy", metrics=["accuracy"])
history = model.fit(
    images[:1500], labels[:1500], batch_size=64, epochs=3, validation_data=(images[1500:], labels[1500:]), verbose=0
)
if strategy.is_chief:
    print("losses", json.dumps(history.history["loss"] + history.history["val_loss"]))
