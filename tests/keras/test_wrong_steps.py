"""Calls of a custom training loop inside a Keras ``train_step``: each would weight or average a second time."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import pytest
import torch

import mirrored.keras
from tests.support.jobs import all_raise, launch, text_of
from tests.support.programs import run_program

Call = Callable[[mirrored.Strategy, torch.Tensor, list[torch.Tensor]], Any]

CALLS: dict[str, Call] = {
    "compute_average_loss": lambda s, losses, p: mirrored.compute_average_loss(losses),
    "scale_regularization_loss": lambda s, losses, p: mirrored.scale_regularization_loss(losses.mean()),
    "strategy.backward()": lambda s, losses, p: s.backward(lambda loss: loss, losses),
    "strategy.grad()": lambda s, losses, p: s.grad(losses.mean(), p),
    "strategy.average_gradients()": lambda s, losses, p: s.average_gradients(p),
}


def messages() -> dict[str, list[str]]:
    """What ``fit`` and ``evaluate`` raise on this tower for each call in a custom step."""
    strategy = mirrored.MirroredStrategy(seed=0)
    chosen = ""

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            return self.dense(x)

        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            losses = (self(x)[:, 0] - y).square()
            CALLS[chosen](strategy, losses, [variable.value for variable in self.trainable_variables])
            return {"loss": losses.mean()}

        test_step = train_step

    found = {}
    x, y = np.ones((6, 2), "float32"), np.zeros(6, "float32")
    with strategy.scope():
        model = Model()
        model.compile("sgd")
    for chosen in CALLS:
        found[chosen] = [
            text_of(RuntimeError, method, x, y, batch_size=6, verbose=0) for method in (model.fit, model.evaluate)
        ]
    return found


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.extended)])
def test_calls_of_a_custom_loop_are_refused_in_a_step_of_keras(count: int) -> None:
    for tower in launch(messages, count=count):
        for call, texts in tower.items():
            for text, step in zip(texts, ("train_step", "test_step"), strict=True):
                assert f"{call} was called in the {step} of a Keras model, whose loss must be a plain mean" in text


METRICS: dict[str, Callable[[], Any]] = {
    "accuracy": lambda: keras.metrics.BinaryAccuracy(name="accuracy"),
    "mean": lambda: keras.metrics.Mean(name="mean"),
    "area": lambda: keras.metrics.AUC(name="area"),
}


def counted() -> list[str]:
    """What ``update_state`` raises in a custom loop; it may be called outside, with the examples of all towers."""
    strategy = mirrored.MirroredStrategy(seed=0)
    y, predicted = torch.tensor([0.0, 1.0, 1.0]), torch.tensor([0.2, 0.9, 0.4])
    texts = []
    for name, make in METRICS.items():
        with strategy.scope():
            metric = make()
        arguments = (predicted,) if name == "mean" else (y, predicted)
        texts.append(text_of(RuntimeError, strategy.run, metric.update_state, args=arguments))
        metric.reset_state()
        metric.update_state(*(strategy.gather(argument) for argument in arguments))
        assert 0 < float(metric.result()) <= 1
    return texts


def test_a_metric_is_not_updated_in_a_custom_loop() -> None:
    for texts in launch(counted):
        for name, text in zip(METRICS, texts, strict=True):
            assert f"the metric '{name}' of Keras was updated inside strategy.run(...) of a custom" in text


class Outside(keras.Model):
    """Counts with a metric that is no attribute of the model."""

    def __init__(self, metric: keras.Metric) -> None:
        super().__init__()
        self.out, self.count = keras.layers.Dense(1), metric.update_state

    def call(self, x: Any) -> Any:
        return self.out(x)

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        self.count(data[0])
        return logs


class Omitted(Outside):
    """Counts with an attribute that its property ``metrics`` omits."""

    def __init__(self, metric: keras.Metric) -> None:
        super().__init__(metric)
        self.metric = metric

    @property
    def metrics(self) -> list[Any]:
        return []


def unlisted() -> list[str]:
    strategy = mirrored.MirroredStrategy(seed=0)
    x = np.arange(28.0).reshape(7, 4)
    texts = []
    for kind in (Outside, Omitted):
        with strategy.scope():
            model = kind(keras.metrics.Mean(name="hidden"))
            model.compile("sgd", "mse")
        texts.append(text_of(RuntimeError, model.fit, x, x[:, :1], verbose=0))
    return texts


def test_a_metric_that_the_model_does_not_list_is_refused() -> None:
    for texts in launch(unlisted):
        for text in texts:
            assert text.startswith("the metric 'hidden' was updated in a step of a Keras model, but model.metrics does")


def _on_the_chief(strategy: mirrored.Strategy, call: str) -> None:
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((8, 3), "float32")
    model.fit(x, x[:, :1], batch_size=4, verbose=0)
    if strategy.is_chief:
        getattr(model, call)(*[x, x[:, :1]][: 1 + (call == "evaluate")], batch_size=4, verbose=0)
    model.fit(x, x[:, :1], batch_size=4, verbose=0)


@pytest.mark.parametrize("call", ["evaluate", "predict"])
def test_a_call_of_the_chief_alone_is_named(call: str) -> None:
    words = (
        f"the towers made different calls: tower 1 the beginning of model.fit, tower 0 the beginning of model.{call}"
    )
    all_raise(mirrored.DisagreementError, words, _on_the_chief, call)


def _in_other_lines() -> None:
    strategy = mirrored.MirroredStrategy(seed=0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((8, 3), "float32")
    if strategy.is_chief:
        model.evaluate(x, x[:, :1], batch_size=4, verbose=0)
    model.evaluate(x, x[:, :1], batch_size=4, verbose=0)


@pytest.mark.extended
def test_an_evaluation_of_the_chief_alone_that_is_paired_with_another_is_named() -> None:
    program = f"import {__name__} as tests, mirrored; mirrored.launch(tests._in_other_lines)"
    result = run_program(["-c", program])
    assert result.returncode == 1  # the chief's second evaluation meets the end of tower 1
    found = re.search(r"evaluate was called in (\S+):(\d+) on tower 0, but in (\S+):(\d+) on tower 1", result.stderr)
    assert found, result.stderr
    assert found[1] == found[3] == "test_wrong_steps.py"
    assert int(found[4]) == int(found[2]) + 1
