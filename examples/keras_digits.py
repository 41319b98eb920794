"""Train a Keras model with model.fit on scikit-learn's 1,797 handwritten digits, on as many towers as there are.

The same file runs unchanged as

    python examples/keras_digits.py                                         every GPU of the machine, else one CPU tower
    python examples/keras_digits.py --devices cpu:0,cpu:1                   two CPU towers
    torchrun --nproc-per-node 2 examples/keras_digits.py
    TF_CONFIG='{"cluster": …, "task": …}' python examples/keras_digits.py    once on every worker

and writes the model and a log of the epochs to --output. With --checkpoints it can be ended at any time, and the same
command resumes from there.
"""

from __future__ import annotations

import argparse
import pathlib

import numpy as np

import mirrored
import mirrored.keras  # before keras: it chooses Keras' torch backend

# isort: split
import keras
from keras import layers


def load_digits() -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Images from 0 to 1 and labels, of a training set and of a test set: every fifth digit (20 %) is held out."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = (data.images / 16).astype("float32")[..., None]
    held_out = np.arange(len(images)) % 5 == 0
    return (images[~held_out], data.target[~held_out]), (images[held_out], data.target[held_out])


def make_model() -> keras.Model:
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.RandomTranslation(0.125, 0.125),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.BatchNormalization(momentum=0.9),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dropout(0.25),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="the global one, over all towers")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--devices", help="such as cpu:0,cpu:1; default: every GPU, else one CPU tower")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("results/keras_digits"))
    parser.add_argument("--checkpoints", type=pathlib.Path, help="a folder to save in, and to go on from")
    arguments = parser.parse_args()

    # A cluster by TF_CONFIG, or torchrun's towers, are found without being told.
    devices = arguments.devices.split(",") if arguments.devices else None
    strategy = mirrored.MultiWorkerMirroredStrategy(devices=devices, seed=arguments.seed)
    with strategy.scope():
        model = make_model()
        model.compile(
            optimizer=keras.optimizers.AdamW(1e-3),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )

    (x, y), (x_test, y_test) = load_digits()
    callbacks = [
        keras.callbacks.ReduceLROnPlateau("val_loss", patience=2, factor=0.5),
        keras.callbacks.ModelCheckpoint(arguments.output / "best.keras", "val_accuracy", save_best_only=True),
        keras.callbacks.CSVLogger(arguments.output / "epochs.csv"),
    ]
    if arguments.checkpoints:
        callbacks.append(mirrored.keras.Checkpoints(arguments.checkpoints, every_steps=100))
    if strategy.is_chief:
        arguments.output.mkdir(parents=True, exist_ok=True)

    model.fit(
        x,
        y,
        batch_size=arguments.batch_size,
        epochs=arguments.epochs,
        validation_data=(x_test, y_test),
        callbacks=callbacks,
        verbose=2,
    )
    loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
    predicted = model.predict(x_test, verbose=0).argmax(1)
    strategy.print(f"test accuracy {accuracy:.2%} on {len(y_test)} held-out digits, loss {loss:.6f}")
    mistaken = np.flatnonzero(predicted != y_test)
    strategy.print(f"not known: {', '.join(f'{y_test[i]} (for a {predicted[i]})' for i in mistaken)}")


if __name__ == "__main__":
    main()
