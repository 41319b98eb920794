"""Transfer learning with Keras: a network that knows the digits 0 to 4 learns 5 to 9 from few examples, on all towers.

A network is trained on 700 images of the digits 0 to 4. Then its convolutions are frozen, a new last layer learns 5 to
9 from 200 images, and at last the convolutions are trained with it at a small learning rate.

    python examples/keras_transfer.py --devices cpu:0,cpu:1
"""

from __future__ import annotations

import argparse

import numpy as np

import mirrored
import mirrored.keras  # before keras: it chooses Keras' torch backend

# isort: split
import keras
from keras import layers


def load_digits(first: int, train: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """The first ``train`` images, and the rest, of five digits from ``first`` on; labels from 0 to 4."""
    from sklearn.datasets import load_digits

    data = load_digits()
    chosen = (data.target >= first) & (data.target < first + 5)
    images, labels = (data.images[chosen] / 16).astype("float32")[..., None], data.target[chosen] - first
    return (images[:train], labels[:train]), (images[train:], labels[train:])


def make_base() -> keras.Model:
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.BatchNormalization(momentum=0.9),
            layers.Conv2D(64, 3, activation="relu"),
            layers.BatchNormalization(momentum=0.9),
            layers.Flatten(),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10, help="of each of the three parts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--devices", help="such as cpu:0,cpu:1; default: every GPU, else one CPU tower")
    arguments = parser.parse_args()
    devices = arguments.devices.split(",") if arguments.devices else None
    strategy = mirrored.MultiWorkerMirroredStrategy(devices=devices, seed=arguments.seed)

    def train(model: keras.Model, first: int, examples: int, learning_rate: float, what: str) -> None:
        with strategy.scope():
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.Adam(learning_rate), loss, metrics=["accuracy"])
        known, held_out = load_digits(first, examples)
        model.fit(*known, batch_size=32, epochs=arguments.epochs, verbose=0)
        _, accuracy = model.evaluate(*held_out, verbose=0)
        strategy.print(f"{what}: {accuracy:.1%} of {len(held_out[1])} held-out digits")

    with strategy.scope():
        base = make_base()
        old, new = keras.Sequential([base, layers.Dense(5)]), keras.Sequential([base, layers.Dense(5)])
    train(old, 0, 700, 3e-3, "0 to 4")
    base.trainable = False
    train(new, 5, 200, 1e-2, "5 to 9, frozen")
    base.trainable = True
    train(new, 5, 200, 3e-4, "5 to 9, fine-tuned")


if __name__ == "__main__":
    main()
