"""Models that Keras trains in float64, each on the same data on any number of towers."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch
from keras import layers, ops
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import mirrored
import mirrored.keras
from tests.keras.own_metrics import Gathered, Mixed, Quotient, mean_of_the_batch
from tests.support.jobs import Settings, strategy_of

EXAMPLES, BATCH = 55, 16
"""Batches of 16, 4 and 3 leave 7, 3 and 1: of the last one some towers get fewer examples than others, or none."""

Case = Callable[[mirrored.Strategy], dict[str, Any]]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def in_float64() -> None:
    """Let Keras compute in float64, which its table of result types turns into float32 on torch."""
    from keras.src.backend.common import dtypes

    keras.config.set_floatx("float64")
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"


def run_all(names: list[str], settings: Settings | None = None) -> dict[str, dict[str, Any]]:
    """On a tower: the results of some cases.

    Args:
        settings: of the strategy, see :func:`strategy_of`.
    """
    in_float64()
    strategy = strategy_of(settings or {})
    results = {}
    for name in names:
        keras.utils.clear_session()  # each names its layers as if it was the first
        keras.utils.set_random_seed(7)
        results[name] = CASES[name](strategy)
    return results


def numbers(*shape: int, seed: int = 0, examples: int = EXAMPLES) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(examples, *shape))


def classes(count: int = 3, seed: int = 1, examples: int = EXAMPLES) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, count, examples)


def seven_batches() -> tuple[np.ndarray, np.ndarray]:
    """More examples (103, 8) and their classes, seven batches of 16."""
    return numbers(8, examples=103), classes(examples=103)


def seen(model: keras.Model, history: Any = None, **more: Any) -> dict[str, Any]:
    found = {f"weight {variable.path}": variable.numpy() for variable in model.variables}
    found |= {f"history {key}": np.array(values) for key, values in (history.history if history else {}).items()}
    return found | {key: np.array(value) for key, value in more.items()}


def fitted(model: keras.Model, *data: Any, **settings: Any) -> dict[str, Any]:
    """What is seen of a model after two epochs."""
    history = model.fit(*data, **{"batch_size": BATCH, "epochs": 2, "verbose": 0} | settings)
    return seen(model, history)


def sequential(strategy: mirrored.Strategy, *parts: layers.Layer, **settings: Any) -> keras.Model:
    """A model of these layers, compiled."""
    with strategy.scope():
        model = keras.Sequential(list(parts))
        model.compile(**settings)
    return model


def dense(strategy: mirrored.Strategy, hidden: int = 16, **settings: Any) -> keras.Model:
    """A classifier, compiled, with a layer of so many hidden units; 0: without it."""
    settings = {"optimizer": "adam", "loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]} | settings
    parts = [layers.Dense(hidden, "relu")] if hidden else []
    return sequential(strategy, *parts, layers.Dense(3, "softmax"), **settings)


@case
def shuffled(strategy: mirrored.Strategy) -> dict[str, Any]:
    model = dense(strategy)
    x, y = numbers(8), classes()
    history = model.fit(x, y, batch_size=BATCH, epochs=2, validation_data=(x[:30], y[:30]), verbose=0)
    return seen(
        model,
        history,
        predictions=model.predict(x, batch_size=BATCH, verbose=0),
        evaluation=model.evaluate(x, y, batch_size=BATCH, verbose=0),
        one_batch=model.predict_on_batch(x[:7]),
    )


@case
def convolutional(strategy: mirrored.Strategy) -> dict[str, Any]:
    with strategy.scope(sync_batch_norm=True):
        model = keras.Sequential(
            [
                layers.Input((8, 8, 1)),
                layers.Conv2D(4, 3, use_bias=False),
                layers.BatchNormalization(momentum=0.9),
                layers.ReLU(),
                layers.Flatten(),
                layers.Dense(3),
            ]
        )
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return fitted(model, numbers(8, 8, 1), classes())


@case
def recurrent(strategy: mirrored.Strategy) -> dict[str, Any]:
    """With a mask, which the loss follows: a tower's entries are not in proportion to its examples."""
    tokens = np.random.default_rng(2).integers(1, 20, (EXAMPLES, 6))
    tokens[np.arange(6) >= np.random.default_rng(3).integers(1, 7, (EXAMPLES, 1))] = 0
    parts = layers.Embedding(20, 5, mask_zero=True), layers.LSTM(6, return_sequences=True), layers.Dense(20)
    settings = {"optimizer": keras.optimizers.RMSprop(0.01), "metrics": ["accuracy"], "weighted_metrics": ["accuracy"]}
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return fitted(sequential(strategy, *parts, loss=loss, **settings), tokens, tokens)


@case
def two_inputs_two_outputs(strategy: mirrored.Strategy) -> dict[str, Any]:
    with strategy.scope():
        one, other = keras.Input((4,), name="one"), keras.Input((3,), name="other")
        joined = layers.Concatenate()([layers.Dense(6, "tanh")(one), layers.Dense(6, "tanh")(other)])
        outputs = {"kind": layers.Dense(3, name="kind")(joined), "size": layers.Dense(1, name="size")(joined)}
        model = keras.Model({"one": one, "other": other}, outputs)
        model.compile(
            "adam",
            {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "size": "mse"},
            loss_weights={"kind": 1.0, "size": 0.3},
            metrics={"kind": "accuracy", "size": "mae"},
        )
    x = {"one": numbers(4), "other": numbers(3, seed=4)}
    y = {"kind": classes(), "size": numbers(1, seed=5)}
    history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0, validation_split=0.375)  # 34: 2 are left
    predictions = model.predict(x, verbose=0)
    return seen(model, history, kind=predictions["kind"], size=predictions["size"])


@case
def weights_of_samples_and_classes(strategy: mirrored.Strategy) -> dict[str, Any]:
    model = dense(strategy, weighted_metrics=["accuracy"])
    x, y = numbers(8), classes()
    weights = np.random.default_rng(6).uniform(size=EXAMPLES)
    first = model.fit(x, y, batch_size=BATCH, sample_weight=weights, verbose=0)
    second = model.fit(x, y, batch_size=BATCH, class_weight={0: 1.0, 1: 3.0, 2: 0.5}, verbose=0)
    return seen(model, second, first=first.history["loss"])


def _reduction(reduction: str) -> Case:
    def train(strategy: mirrored.Strategy) -> dict[str, Any]:
        loss = keras.losses.MeanSquaredError(reduction=reduction)
        model = sequential(strategy, layers.Dense(1), optimizer=keras.optimizers.SGD(1e-3), loss=loss)
        weights = np.random.default_rng(6).uniform(size=EXAMPLES)
        return fitted(model, numbers(4), numbers(1, seed=5), sample_weight=weights)

    return train


for _name in ("sum", "mean", "mean_with_sample_weight", "sum_over_batch_size"):
    CASES[f"reduction {_name}"] = _reduction(_name)


@case
def regularised(strategy: mirrored.Strategy) -> dict[str, Any]:
    """Of weights, of activities, and by ``add_loss``."""

    class Penalty(layers.Layer):
        def call(self, x: Any) -> Any:
            self.add_loss(0.01 * ops.mean(ops.square(x)))
            return x

    both, of_activity = keras.regularizers.L1L2(0.01, 0.01), keras.regularizers.L1(0.01)
    hidden = layers.Dense(8, "relu", kernel_regularizer=both, activity_regularizer=of_activity)
    model = sequential(strategy, hidden, Penalty(), layers.Dense(1), optimizer="sgd", loss="mse")
    return fitted(model, numbers(4), numbers(1, seed=5))


@case
def loss_of_ones_own(strategy: mirrored.Strategy) -> dict[str, Any]:
    """Which returns the batch's mean, not one value for each example."""
    model = dense(strategy, loss=lambda y, p: ops.mean(keras.losses.sparse_categorical_crossentropy(y, p)))
    return fitted(model, numbers(8), classes())


@case
def step_of_ones_own(strategy: mirrored.Strategy) -> dict[str, Any]:
    """Whose backward calls itself: in a reentrant checkpoint, and for the mode that ``torch.device`` is."""

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.out = layers.Dense(4), layers.Dense(1)
            self.tracker = keras.metrics.Mean(name="tracked")
            self.mae = keras.metrics.MeanAbsoluteError(name="mae")

        def call(self, x: Any) -> Any:
            return checkpoint(self.out, self.hidden(x), use_reentrant=True)

        @property
        def metrics(self) -> list[Any]:
            return [self.tracker, self.mae]

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            self.zero_grad()
            predicted = self(x, training=True)
            loss = torch.nn.functional.mse_loss(predicted, y)
            loss.backward()
            variables = list(self.trainable_weights)
            with torch.no_grad():
                self.optimizer.apply([v.value.grad for v in variables], variables)
            self.tracker.update_state(loss)
            self.mae.update_state(y, predicted)
            return {"tracked": self.tracker.result(), "mae": self.mae.result(), "raw": loss.detach()}

    with strategy.scope():
        model = Model()
        model.compile(optimizer="adam")
    with torch.device("cpu"):
        return fitted(model, numbers(4), numbers(1, seed=5))


@case
def fewer_examples_than_towers(strategy: mirrored.Strategy) -> dict[str, Any]:
    model = dense(strategy)
    x, y = numbers(8)[:11], classes()[:11]
    found = fitted(model, x, y, batch_size=3, validation_data=(x[:1], y[:1]))
    return found | {"predictions": model.predict(x, batch_size=2, verbose=0)}


@case
def metrics_that_are_no_means(strategy: mirrored.Strategy) -> dict[str, Any]:
    names = [
        keras.metrics.AUC(name="auc"),
        keras.metrics.Precision(0.3, name="precision"),
        keras.metrics.F1Score(name="f1"),
        keras.metrics.MeanIoU(2, name="iou"),
        keras.metrics.R2Score(name="r2"),
        keras.metrics.RootMeanSquaredError(name="rmse"),
        keras.metrics.SensitivityAtSpecificity(0.5, name="sensitivity"),
    ]
    output = layers.Dense(1, "sigmoid")
    model = sequential(strategy, output, optimizer="sgd", loss="binary_crossentropy", metrics=names)
    x, y = numbers(4), (numbers(1, seed=5) > 0).astype("float64")
    found = fitted(model, x, y, validation_data=(x, y))
    evaluated = model.evaluate(x, y, verbose=0, return_dict=True)
    return found | {f"evaluated {key}": np.array(value) for key, value in evaluated.items()}


@case
def metrics_of_ones_own(strategy: mirrored.Strategy) -> dict[str, Any]:
    found = {}
    for size, rows in ((BATCH, EXAMPLES), (3, 22)):  # of three examples some towers have one, and others none
        keras.utils.set_random_seed(7)
        model = dense(strategy, metrics=[Quotient(), Gathered(strategy), Mixed(strategy), mean_of_the_batch])
        x, y = numbers(8)[:rows], classes()[:rows]
        results = fitted(model, x, y, batch_size=size, validation_data=(x[: 2 * size - 2], y[: 2 * size - 2]))
        found |= {f"{key} by {size}": value for key, value in results.items() if "weight" not in key}
    return found


def _tensors() -> TensorDataset:
    return TensorDataset(torch.from_numpy(numbers(8)), torch.from_numpy(classes()))


@case
def loader(strategy: mirrored.Strategy) -> dict[str, Any]:
    model = dense(strategy)
    data, in_order = (DataLoader(_tensors(), batch_size=BATCH, shuffle=shuffle) for shuffle in (True, False))
    found = fitted(model, data, batch_size=None, validation_data=in_order)
    return found | {"predictions": model.predict(in_order, verbose=0)}


def _padded(examples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    tokens, targets = zip(*examples, strict=True)
    return pad_sequence(tokens, batch_first=True), pad_sequence(targets, batch_first=True)


def _padding(masked: bool) -> Case:
    def run(strategy: mirrored.Strategy) -> dict[str, Any]:
        """Batches are as long as their longest text, which one tower has."""
        rng = np.random.default_rng(4)
        texts = [torch.from_numpy(rng.integers(1, 20, rng.integers(1, 12))) for _ in range(EXAMPLES)]
        parts = layers.Embedding(20, 5, mask_zero=masked), layers.LSTM(6, return_sequences=True), layers.Dense(20)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model = sequential(strategy, *parts, loss=loss, optimizer="adam", metrics=["accuracy"])
        data = DataLoader([(text, text) for text in texts], BATCH, shuffle=True, collate_fn=_padded)
        found = fitted(model, data, batch_size=None)
        first = DataLoader([(texts[0], texts[0]), (texts[1], texts[1])], 2, collate_fn=_padded)
        evaluated = model.evaluate(data, verbose=0)
        return found | {"evaluated": np.array(evaluated), "predicted": model.predict(first, verbose=0)}

    return run


CASES |= {"padded": _padding(False), "padded and masked": _padding(True)}


class _Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(_tensors())


@case
def loader_of_a_stream(strategy: mirrored.Strategy) -> dict[str, Any]:
    """It has no length, for which the progress bar asks."""
    return fitted(dense(strategy), DataLoader(_Stream(), batch_size=BATCH), batch_size=None, verbose=1)


@case
def distributed_dataset(strategy: mirrored.Strategy) -> dict[str, Any]:
    data = strategy.distribute_dataset(_tensors(), 4, shuffle=True, seed=3)
    return fitted(dense(strategy), data, batch_size=None)


@case
def tensors(strategy: mirrored.Strategy) -> dict[str, Any]:
    return fitted(dense(strategy), *_tensors().tensors, shuffle="batch", steps_per_epoch=3)


@case
def py_dataset(strategy: mirrored.Strategy) -> dict[str, Any]:
    class Data(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
            rows = slice(BATCH * index, BATCH * index + BATCH)
            return numbers(8)[rows] + 0.1 * np.random.normal(size=(1, 8)), classes()[rows]

    return fitted(dense(strategy), Data(), batch_size=None, class_weight={0: 1.0, 1: 2.0, 2: 1.0})


class Batches(keras.utils.PyDataset):
    """Batches of eight, in order."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        super().__init__()
        self.x, self.y = x, y

    def __len__(self) -> int:
        return -(-len(self.x) // 8)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(8 * index, 8 * index + 8)
        return self.x[rows], self.y[rows]


@case
def py_dataset_between_arrays(strategy: mirrored.Strategy) -> dict[str, Any]:
    """Its loader draws a seed, after which arrays are shuffled."""
    model = dense(strategy)
    x, y = numbers(8), classes()
    data, settings = Batches(x[:21], y[:21]), {"batch_size": BATCH, "epochs": 2, "verbose": 0}
    histories = [
        model.fit(x, y, validation_data=data, **settings),
        model.fit(data, epochs=2, verbose=0),
        model.fit(x, y, **settings),
    ]
    evaluated = model.evaluate(data, verbose=0)
    histories.append(model.fit(x, y, **settings))
    predicted = model.predict(data, verbose=0)
    histories.append(model.fit(x, y, **settings))
    losses = [loss for history in histories for loss in history.history["loss"]]
    return seen(model, histories[0], losses=losses, evaluated=evaluated, predicted=predicted)


@case
def generator(strategy: mirrored.Strategy) -> dict[str, Any]:
    def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        while True:
            rows = np.random.permutation(EXAMPLES)[:13]
            yield numbers(8)[rows], classes()[rows]

    steps = {"steps_per_epoch": 5, "validation_steps": 2}
    return fitted(dense(strategy), batches(), batch_size=None, validation_data=batches(), **steps)


@case
def single_batches(strategy: mirrored.Strategy) -> dict[str, Any]:
    model = dense(strategy)
    x, y = numbers(8), classes()
    logs = [model.train_on_batch(x[i : i + 7], y[i : i + 7]) for i in range(0, 35, 7)]
    weighted = model.train_on_batch(x[:9], y[:9], class_weight={0: 1.0, 1: 2.0, 2: 0.0}, return_dict=True)
    return seen(model, None, logs=logs, weighted=weighted["loss"], tested=model.test_on_batch(x[:8], y[:8]))


@case
def optimizers_of_all_kinds(strategy: mirrored.Strategy) -> dict[str, Any]:
    found: dict[str, Any] = {}
    settings: list[dict[str, Any]] = [
        {"global_clipnorm": 0.1},
        {"gradient_accumulation_steps": 3},
        {"use_ema": True, "ema_overwrite_frequency": 4},
        {"weight_decay": 0.01, "clipvalue": 0.05},
        {"loss_scale_factor": 64.0},
    ]
    for number, setting in enumerate(settings):
        model = dense(strategy, optimizer=keras.optimizers.Adam(0.01, **setting))
        results = fitted(model, numbers(8), classes())
        found |= {f"{number} {key}": value for key, value in results.items() if "weight" not in key}
        found |= {f"{number} {index}": value for index, value in enumerate(model.get_weights())}
    return found


@case
def frozen_between_fits(strategy: mirrored.Strategy) -> dict[str, Any]:
    with strategy.scope():
        base = keras.Sequential([layers.Input((8,)), layers.Dense(6, "relu"), layers.BatchNormalization()])
        base.trainable = False
        model = keras.Sequential([base, layers.Dense(3, "softmax")])
        model.compile("adam", "sparse_categorical_crossentropy")
    x, y = numbers(8), classes()
    first = model.fit(x, y, batch_size=BATCH, verbose=0)
    base.layers[0].trainable = True
    with strategy.scope():
        model.compile("adam", "sparse_categorical_crossentropy")
    second = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
    return seen(model, second, first=first.history["loss"])


@case
def callbacks_decide(strategy: mirrored.Strategy) -> dict[str, Any]:
    seen_rates = []

    class Rates(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen_rates.append((float(self.model.optimizer.learning_rate), float(logs["loss"])))

    model = dense(strategy, optimizer=keras.optimizers.SGD(5.0))
    callbacks = [
        Rates(),
        keras.callbacks.ReduceLROnPlateau("loss", patience=1, factor=0.5),
        keras.callbacks.EarlyStopping("accuracy", patience=2, restore_best_weights=True),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
    ]
    history = model.fit(numbers(8), classes(), batch_size=BATCH, epochs=15, callbacks=callbacks, verbose=0)
    rates = history.history["learning_rate"]
    assert len(rates) < 15, "it does not stop early"
    assert min(after / before for before, after in itertools.pairwise(rates)) < 0.5, "no rate is halved"
    return seen(model, history, rates=seen_rates)
