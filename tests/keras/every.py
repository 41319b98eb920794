"""Every metric and loss of Keras, and layers with state, each in a model. The last batch has 9 examples, or one."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
from keras import layers

import mirrored
import mirrored.keras
from tests.keras.cases import in_float64

BATCH, SIZES = 9, (27, 28)

LEFT_OUT = {
    "Metric": "a base class",
    "MeanMetricWrapper": "a base class",
    "Loss": "a base class",
    "Mean": "has no targets",
    "Sum": "has no targets",
}
SETTINGS: dict[str, dict[str, Any]] = {
    "BinaryIoU": {"target_class_ids": [0, 1]},
    "IoU": {"num_classes": 3, "target_class_ids": [0, 2], "sparse_y_pred": False},
    "MeanIoU": {"num_classes": 3, "sparse_y_pred": False},
    "OneHotIoU": {"num_classes": 3, "target_class_ids": [0, 2]},
    "OneHotMeanIoU": {"num_classes": 3},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SparseTopKCategoricalAccuracy": {"k": 2},
    "TopKCategoricalAccuracy": {"k": 2},
}
KINDS = {
    "one of three, in one column for each": (
        *("CategoricalAccuracy", "CategoricalCrossentropy", "CategoricalHinge", "TopKCategoricalAccuracy", "OneHotIoU"),
        *("OneHotMeanIoU", "F1Score", "FBetaScore", "CategoricalFocalCrossentropy", "KLDivergence", "Dice", "Tversky"),
    ),
    "one of three": (
        *("SparseCategoricalAccuracy", "SparseCategoricalCrossentropy", "SparseTopKCategoricalAccuracy", "IoU"),
        *("MeanIoU", "Circle", "CategoricalGeneralizedCrossEntropy"),
    ),
    "numbers": (
        *("MeanSquaredError", "MeanAbsoluteError", "MeanAbsolutePercentageError", "MeanSquaredLogarithmicError"),
        *("RootMeanSquaredError", "LogCoshError", "LogCosh", "Huber", "R2Score", "PearsonCorrelation", "Poisson"),
        *("ConcordanceCorrelation", "CosineSimilarity"),
    ),
    "whole numbers": ("Accuracy",),
    "sequences": ("CTC",),
}
"""The kind of targets; the others have targets of 0 and 1."""


def classes_of(module: Any) -> dict[str, type]:
    """The classes of ``keras.metrics`` or ``keras.losses``, by name."""
    found = {name: value for name, value in vars(module).items() if inspect.isclass(value)}
    return {name: value for name, value in sorted(found.items()) if name not in LEFT_OUT}


def data_of(kind: str, size: int) -> tuple[np.ndarray, np.ndarray]:
    numbers = np.random.default_rng(3)
    x, targets = numbers.normal(size=(size, 6)), numbers.integers(0, 3, size)
    match kind:
        case "one of three, in one column for each":
            return x, np.eye(3)[targets]
        case "one of three":
            return x, targets
        case "numbers":
            return x, numbers.uniform(0.5, 2.0, size=(size, 2))
        case "sequences":
            return x, numbers.integers(1, 4, size=(size, 2))
    return x, (targets > 0).astype("float64")[:, None]


def model_of(strategy: mirrored.Strategy, kind: str, **compiled: Any) -> Any:
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(7)
    outputs: dict[str, list[Any]] = {
        "one of three, in one column for each": [layers.Dense(3, activation="softmax")],
        "one of three": [layers.Dense(3, activation="softmax")],
        "numbers": [layers.Dense(2, activation="softplus")],
        "whole numbers": [layers.Dense(1, activation="sigmoid"), layers.Lambda(keras.ops.round)],
        "sequences": [layers.Dense(24), layers.Reshape((6, 4))],
    }
    with strategy.scope():
        parts = outputs.get(kind, [layers.Dense(1, activation="sigmoid")])
        model = keras.Sequential([layers.Input((6,)), *parts])
        model.compile(keras.optimizers.SGD(0.05), **compiled)
    return model


def kind_of(name: str) -> str:
    return next((kind for kind, names in KINDS.items() if name in names), "0 or 1")


def _metric(strategy: mirrored.Strategy, name: str, made: type, size: int) -> Any:
    kind = kind_of(name)
    loss = "sparse_categorical_crossentropy" if kind == "one of three" else "mse"
    model = model_of(strategy, kind, loss=loss, metrics=[made(**SETTINGS.get(name, {}), name="value")])
    x, y = data_of(kind, size)
    history = model.fit(x, y, batch_size=BATCH, verbose=0).history
    tested = model.evaluate(x, y, batch_size=BATCH, verbose=0, return_dict=True)
    return [np.asarray(found["value"]).tolist() for found in (tested, {key: each[-1] for key, each in history.items()})]


def _loss(strategy: mirrored.Strategy, name: str, made: type, size: int) -> Any:
    kind = kind_of(name)
    model = model_of(strategy, kind, loss=made())
    x, y = data_of(kind, size)
    history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0).history["loss"]
    tested = model.evaluate(x, y, batch_size=BATCH, verbose=0)
    return [*history, tested, *model.layers[0].kernel.numpy().flatten().tolist()]


class Total(layers.Layer):
    """Adds up its inputs in training."""

    def build(self, shape: Any) -> None:
        self.total = self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation="sum")

    def call(self, x: Any, training: bool = False) -> Any:
        if training:
            self.total.assign(self.total + keras.ops.sum(x))
        return x


class SelfAttention(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 3)

    def build(self, shape: Any) -> None:
        self.attention.build(shape, shape)

    def call(self, x: Any) -> Any:
        return self.attention(x, x)


def _adapted() -> Any:
    layer = layers.Normalization()
    layer.adapt(data_of("", 54)[0])
    return layer


LAYERS: dict[str, Callable[[], list[Any]]] = {
    "BatchNormalization": lambda: [layers.Dense(4), layers.BatchNormalization()],
    "SpectralNormalization": lambda: [layers.SpectralNormalization(layers.Dense(4))],
    "Normalization": lambda: [_adapted()],
    "LayerNormalization": lambda: [layers.Dense(4), layers.LayerNormalization()],
    "GroupNormalization": lambda: [layers.Dense(4), layers.GroupNormalization(2)],
    "RMSNormalization": lambda: [layers.Dense(4), layers.RMSNormalization()],
    "UnitNormalization": lambda: [layers.Dense(4), layers.UnitNormalization()],
    "LSTM": lambda: [layers.Reshape((3, 2)), layers.LSTM(4)],
    "Bidirectional": lambda: [layers.Reshape((3, 2)), layers.Bidirectional(layers.GRU(4))],
    "attention": lambda: [layers.Reshape((3, 2)), SelfAttention(), layers.Flatten()],
    "Embedding": lambda: [layers.Discretization([-1.0, 0.0, 1.0]), layers.Embedding(5, 3), layers.Flatten()],
    "penalties": lambda: [layers.Dense(4, activity_regularizer="l2"), layers.ActivityRegularization(l2=0.1)],
    "PReLU": lambda: [layers.Dense(4), layers.PReLU()],
    "a sum": lambda: [Total()],
}


def _layer(strategy: mirrored.Strategy, name: str, make: Callable[[], list[Any]], size: int) -> Any:
    """Losses of two epochs, an evaluation, predictions, and all variables, with averaged weights."""
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(7)
    x, y = data_of("0 or 1", size)
    with strategy.scope(sync_batch_norm=True):
        model = keras.Sequential([layers.Input((6,)), *make(), layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.05, use_ema=True), "mse")
    history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0).history["loss"]
    found = [*history, model.evaluate(x, y, batch_size=BATCH, verbose=0)]
    found += [model.predict(x, batch_size=BATCH, verbose=0).tolist()]
    return found + [variable.numpy().tolist() for variable in model.variables if "seed" not in variable.path]


def results(which: str) -> dict[tuple[str, int], Any]:
    """The values of each metric, or the losses and weights of each loss or layer: numbers, or the text of an error."""
    in_float64()
    strategy = mirrored.MirroredStrategy(seed=0)
    found: dict[tuple[str, int], Any] = {}
    value_of: Callable[..., Any] = {"metrics": _metric, "losses": _loss, "layers": _layer}[which]
    tried = LAYERS if which == "layers" else classes_of(getattr(keras, which))
    for name, made in tried.items():
        for size in SIZES:
            try:
                found[name, size] = value_of(strategy, name, made, size)
            except Exception as error:
                found[name, size] = f"{type(error).__name__}: {error}"
    return found
