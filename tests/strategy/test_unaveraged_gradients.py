"""Gradients that nobody averages and parameters that nobody compares are errors."""

from __future__ import annotations

import importlib
import os
import re

import pytest
import torch
from torch import Tensor, nn

import mirrored
from tests.support.jobs import all_raise, make_data, make_mlp, parameters_of, towers
from tests.support.steps import local_share
from tests.support.waiting import HANG


def _loss(model: nn.Module, strategy: mirrored.Strategy) -> Tensor:
    """Of this tower's own examples."""
    x, y = local_share(strategy, *make_data(8))
    return nn.functional.cross_entropy(model(x), y)


def _gradients_from_elsewhere(strategy: mirrored.Strategy, in_place: bool) -> None:
    with strategy.scope():
        model = make_mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def averaged() -> None:
        _loss(model, strategy).backward()
        optimizer.step()

    def own() -> None:
        gradients = torch.autograd.grad(_loss(model, strategy), list(model.parameters()))
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            if in_place:
                parameter.grad.copy_(gradient)
            else:
                parameter.grad = gradient
        optimizer.step()

    strategy.run(averaged)
    strategy.run(own)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_step_on_gradients_that_were_not_averaged_is_refused(in_place: bool, sharded: bool) -> None:
    with pytest.raises(mirrored.TowerFailedError) as caught:
        towers(_gradients_from_elsewhere, in_place, settings={"shard_optimizer": sharded})
    found = [str(failed.exception) for failed in caught.value.failures if not failed.consequence]
    assert found
    words = (
        r"SGD.step\(\) on tower \d uses gradients that no backward\(\) has averaged .*Sequential.0.weight and 3 more"
    )
    for text in found:
        assert re.search(words, text)
        assert "strategy.grad(loss, parameters)" in text


def _steps_that_are_right(strategy: mirrored.Strategy) -> list[Tensor]:
    """Gradients that are kept, zeroed, scaled, replaced or accumulated; closures; a model of which nothing is used."""
    with strategy.scope():
        model, other = make_mlp(), make_mlp(seed=1)
        one = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        two = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
        newton = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def step(kind: int) -> None:
        for optimizer in (one, two):
            optimizer.zero_grad(set_to_none=kind % 2 == 0)
        with strategy.no_sync():
            _loss(model, strategy).backward()
        _loss(model, strategy).backward()
        if kind == 2:
            _loss(other, strategy).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for parameter in model.parameters():
            parameter.grad = parameter.grad * 0.5
        one.step()
        two.step()  # momentum goes on where nothing was used

    def closure() -> Tensor:
        newton.zero_grad()
        loss: Tensor = strategy.reduce("mean", _loss(model, strategy).detach())
        _loss(model, strategy).backward()
        return loss

    def last_of_several() -> None:
        one.zero_grad()
        with strategy.no_sync():
            _loss(model, strategy).backward()
        one.step(lambda: _loss(model, strategy).backward())

    for kind in range(4):
        strategy.run(step, args=(kind,))
    strategy.run(lambda: newton.step(closure))
    strategy.run(last_of_several)
    strategy.check_mirrored()
    return parameters_of(model) + parameters_of(other)


def test_steps_on_averaged_gradients_are_left_alone() -> None:
    first, second = towers(_steps_that_are_right)
    assert all(map(torch.equal, first, second))


def _by_hand(strategy: mirrored.Strategy) -> None:
    """Updates that are no ``torch.optim``, by gradients of this tower's own."""
    model = strategy.mirror(make_mlp())

    def step() -> None:
        gradients = torch.autograd.grad(_loss(model, strategy), list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient

    for _ in range(3):
        strategy.run(step)


def test_updates_by_hand_are_found_when_towers_differ() -> None:
    words = "parameter Sequential.0.weight is no longer the same on all towers"
    text, _ = all_raise(mirrored.MirrorError, words, _by_hand, same=True)
    assert "at the start of run 2" in text
    assert "gradients that no backward() has averaged" in text


def _replaced_later(strategy: mirrored.Strategy, equal: bool) -> None:
    model = strategy.mirror(make_mlp())
    strategy.run(lambda: _loss(model, strategy).backward())
    torch.manual_seed(0 if equal else strategy.topology.index)
    model[2] = nn.Linear(16, 3, dtype=torch.float64).requires_grad_(False)
    for _ in range(3):
        strategy.run(lambda: _loss(model, strategy).backward())
    strategy.check_mirrored()


def test_a_layer_that_was_replaced_after_the_first_run_is_compared() -> None:
    words = "^parameter that is not mirrored Sequential.2.weight is no longer the same on all towers"
    text, _ = all_raise(mirrored.MirrorError, words, _replaced_later, False, same=True)
    assert "Also different: 1 parameter that is not mirrored." in text
    assert "strategy.mirror(module)" in text
    towers(_replaced_later, True)


def _backward_before_run(strategy: mirrored.Strategy, mirror: bool) -> None:
    if mirror:
        model: nn.Module = strategy.mirror(make_mlp())
    else:
        with strategy.scope():
            model = make_mlp()
    _loss(model, strategy).backward()


@pytest.mark.parametrize("mirror", [False, True])
def test_a_backward_before_the_first_run_is_refused(mirror: bool) -> None:
    words = r"reached (Linear|Sequential[.]\d)[.](weight|bias), .* before the first strategy.run"
    for tower, text in enumerate(all_raise(mirrored.MirrorError, words, _backward_before_run, mirror)):
        assert f"backward() on tower {tower} reached" in text


def _keras(built: bool, inside: bool) -> list[float]:
    """A Keras model that is made in the scope, built there or when it is trained, and trained in ``run`` or not."""
    os.environ["KERAS_BACKEND"] = "torch"
    keras = importlib.import_module("keras")
    strategy = mirrored.MirroredStrategy(seed=0)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(3)])
        if built:
            model.build((None, 5))
        model.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = local_share(strategy, *make_data(8, torch.float32))

    def fit() -> None:
        model.fit(x, y, batch_size=4, verbose=0)

    if inside:
        strategy.run(fit)
    else:
        fit()
    return [float(variable.value.sum()) for variable in model.trainable_variables]


@pytest.mark.parametrize(
    ("built", "inside", "words"),
    [
        (True, False, "before the first strategy.run.*put the line 'import mirrored.keras'"),
        (False, True, r"of a Keras \w+, which no scope mirrored.*put the line 'import mirrored.keras'"),
    ],
)
def test_keras_layers_that_nobody_averages_are_refused(built: bool, inside: bool, words: str) -> None:
    with pytest.raises(mirrored.TowerFailedError, match=rf"MirrorError: backward\(\) on tower \d reached .*{words}"):
        mirrored.launch(_keras, (built, inside), devices=["cpu:0", "cpu:1"], timeout=HANG)


def test_a_keras_layer_that_was_built_in_the_scope_stays_equal() -> None:
    first, second = mirrored.launch(_keras, (True, True), devices=["cpu:0", "cpu:1"], timeout=HANG)
    assert first == second
