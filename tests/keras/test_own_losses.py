"""Losses as scripts write them: means over examples are exact on several towers, all others are refused by name."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import pytest
import torch
from keras import ops

import mirrored.keras
from tests.support.jobs import launch
from tests.support.logs import Records

pytestmark = pytest.mark.extended


class WithTemperature(keras.losses.Loss):
    """Compares each example with all others of its batch."""

    def call(self, y: Any, p: Any) -> Any:
        return keras.losses.sparse_categorical_crossentropy(ops.arange(len(p)), p @ p.T, from_logits=True)


def scalar_mean(y: Any, p: Any) -> Any:
    return ops.mean(ops.square(y - p))


def one_for_each_output(y: Any, p: Any) -> Any:
    return ops.abs(y - p)


def a_sum(y: Any, p: Any) -> Any:
    return ops.sum(ops.square(y - p))


def of_valid_ones(y: Any, p: Any) -> Any:
    valid = ops.cast(y[:, 0] > 0, p.dtype)
    return ops.sum(valid * ops.mean(ops.square(y - p), -1)) / ops.maximum(ops.sum(valid), 1.0)


def random_noise(y: Any, p: Any) -> Any:
    return ops.mean(ops.square(y - p + torch.randn(len(p), 2)), -1)


def over_all_towers(y: Any, p: Any) -> Any:
    """The distance of each example from the mean of all towers' predictions."""
    replica = mirrored.get_replica_context()
    every = p if replica is None or mirrored.get_strategy().num_replicas_in_sync == 1 else replica.all_gather(p)
    return ops.mean(ops.square(p - ops.mean(every, 0)), -1)


EXACT = [scalar_mean, one_for_each_output, over_all_towers]
REFUSED = [WithTemperature, a_sum, of_valid_ones]


def fit(loss: Callable[..., Any]) -> list[float] | str:
    strategy = mirrored.MirroredStrategy(seed=0)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1), loss() if isinstance(loss, type) else loss)
    x = np.random.default_rng(0).normal(size=(21, 3)).astype("float32")
    for last in (False, True):
        try:
            model.fit(x, x[:, :2] ** 2 - 0.5, batch_size=8, epochs=1, shuffle=False, verbose=0)
        except TypeError as error:  # each time
            if last:
                return str(error)
    return [float(number) for weight in model.get_weights() for number in weight.flatten()]


@pytest.mark.parametrize("loss", EXACT)
def test_means_over_examples_are_exact(loss: Callable[..., Any]) -> None:
    [alone] = launch(fit, loss, count=1)
    for count in (2, 3):
        for weights in launch(fit, loss, count=count):
            assert weights == pytest.approx(alone, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("loss", REFUSED)
def test_other_losses_are_refused(loss: Callable[..., Any]) -> None:
    [alone] = launch(fit, loss, count=1)
    assert isinstance(alone, list)
    for text in launch(fit, loss):
        assert isinstance(text, str)
        assert text.startswith(f"the loss '{loss.__name__}' would be wrong on several towers: for 4 examples it is ")


def test_random_losses_are_not_probed() -> None:
    assert all(isinstance(weights, list) for weights in launch(fit, random_noise))


class Adds(keras.Model):
    """Adds a penalty of its hidden values."""

    def __init__(self, reduce: str) -> None:
        super().__init__()
        self.hidden, self.norm = keras.layers.Dense(3), keras.layers.BatchNormalization()
        self.drop, self.out, self.reduce = keras.layers.Dropout(0.5), keras.layers.Dense(2), getattr(ops, reduce)

    def call(self, x: Any, training: bool = False) -> Any:
        hidden = self.norm(self.hidden(x), training=training)
        self.add_loss(self.reduce(ops.square(hidden)))
        return self.out(self.drop(hidden, training=training))


def warnings_of(reduce: str) -> list[str]:
    strategy, records = mirrored.MirroredStrategy(seed=0), Records()
    with strategy.scope():
        model = Adds(reduce)
        model.compile(keras.optimizers.SGD(0.1), "mse")
    logging.getLogger("mirrored").addHandler(records)
    x = np.random.default_rng(0).normal(size=(21, 3)).astype("float32")
    model.fit(x, x[:, :2], batch_size=8, shuffle=False, verbose=0)
    return [text for text in records.messages if "add_loss" in text]


def test_added_losses_that_are_sums_are_warned_of_once() -> None:
    for [text] in launch(warnings_of, "sum"):
        assert "are wrong on several towers: for 4 examples they are" in text
    for reduce, count in (("mean", 2), ("sum", 1)):
        assert launch(warnings_of, reduce, count=count) == [[]] * count


class Computes(keras.Model):
    """Has a loss of its own, which may use that of ``compile``."""

    def __init__(self, reduce: str) -> None:
        super().__init__()
        self.out, self.reduce = keras.layers.Dense(2, kernel_regularizer="l2"), reduce

    def call(self, x: Any) -> Any:
        return self.out(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        if self.reduce == "compiled":
            return 0.5 * super().compute_loss(x, y, y_pred, sample_weight, training)
        return getattr(ops, self.reduce)(ops.square(y - y_pred)) + sum(self.losses)


def fit_own(reduce: str, reduction: str) -> list[float] | str:
    strategy = mirrored.MirroredStrategy(seed=0)
    with strategy.scope():
        model = Computes(reduce)
        model.compile(keras.optimizers.SGD(0.1), keras.losses.MeanSquaredError(reduction), metrics=["mae"])
    x = np.random.default_rng(0).normal(size=(21, 3)).astype("float32")
    for last in (False, True):
        try:
            history = model.fit(x, x[:, :2], batch_size=8, epochs=1, shuffle=False, verbose=0)
        except TypeError as error:  # each time
            if last:
                return str(error)
    assert "compute_loss" not in vars(model)
    return [*model.get_weights()[0].flatten().tolist(), *history.history["mae"], *history.history["loss"]]


@pytest.mark.parametrize(
    ("reduce", "reduction"), [("mean", "mean"), ("compiled", "sum_over_batch_size"), ("compiled", "sum")]
)
def test_an_own_compute_loss_that_is_a_mean_is_exact(reduce: str, reduction: str) -> None:
    [alone] = launch(fit_own, reduce, reduction, count=1)
    for numbers in launch(fit_own, reduce, reduction):
        assert numbers == pytest.approx(alone, rel=1e-4, abs=1e-6)


def test_an_own_compute_loss_that_is_a_sum_is_refused() -> None:
    for text in launch(fit_own, "sum", "mean"):
        assert text.startswith("the loss 'Computes.compute_loss' would be wrong on several towers")


GLOBAL_BATCH = 64


class Steps(keras.Model):
    """Has a step of its own, and counts its calls. Normalisation and dropout make a loss depend on the batch."""

    def __init__(self, loss_of: Callable[..., Any], regularizing: bool) -> None:
        super().__init__()
        self.loss_of, self.calls = loss_of, 0
        self.norm = keras.layers.BatchNormalization() if regularizing else keras.layers.Identity()
        self.drop = keras.layers.Dropout(0.3 if regularizing else 0.0)
        self.out, self.mean = keras.layers.Dense(2), keras.metrics.Mean(name="loss")

    def call(self, x: Any, training: bool = False) -> Any:
        return self.out(self.drop(self.norm(x, training=training), training=training))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        self.calls += 1
        self.zero_grad()
        loss = self.loss_of(ops.mean(ops.square(y - self(x, training=True)), -1))
        self.mean.update_state(loss, len(x))
        loss.backward()
        variables = self.trainable_weights
        self.optimizer.apply([variable.value.grad for variable in variables], variables)
        return {"loss": self.mean.result()}


def mean_of_share(losses: Any) -> Any:
    return ops.mean(losses)


def sum_over_share(losses: Any) -> Any:
    return ops.sum(losses) / len(losses)


def sum_over_batch(losses: Any) -> Any:
    return ops.sum(losses) / GLOBAL_BATCH


def fit_steps(loss_of: Callable[..., Any], regularizing: bool) -> list[float] | str:
    strategy = mirrored.MirroredStrategy(seed=0)
    with strategy.scope():
        model = Steps(loss_of, regularizing)
        model.compile(keras.optimizers.SGD(0.1))
    x = np.random.default_rng(0).normal(size=(180, 3)).astype("float32")
    try:
        history = model.fit(x, x[:, :2], batch_size=GLOBAL_BATCH, epochs=2, shuffle=False, verbose=0)
    except TypeError as error:
        return str(error)
    assert model.calls == 6
    return [*model.get_weights()[-1].flatten().tolist(), *history.history["loss"], torch.rand(()).item()]


@pytest.mark.parametrize("loss_of", [mean_of_share, sum_over_share])
def test_an_own_step_with_a_mean_has_the_numbers_of_one_tower(loss_of: Callable[..., Any]) -> None:
    [alone] = launch(fit_steps, loss_of, False, count=1)
    for count in (2, 3):
        for numbers in launch(fit_steps, loss_of, False, count=count):
            assert numbers == pytest.approx(alone, rel=1e-4, abs=1e-6)


def test_an_own_step_with_normalisation_and_dropout_passes() -> None:
    assert all(isinstance(numbers, list) for numbers in launch(fit_steps, mean_of_share, True))


@pytest.mark.parametrize("regularizing", [False, True])
def test_an_own_step_with_a_sum_over_the_global_batch_is_refused(regularizing: bool) -> None:
    [alone] = launch(fit_steps, sum_over_batch, regularizing, count=1)
    assert isinstance(alone, list)
    for text in launch(fit_steps, sum_over_batch, regularizing):
        assert isinstance(text, str)
        assert text.startswith("the loss of Steps.train_step would be wrong on several towers: it is ")
