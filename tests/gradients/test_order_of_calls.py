"""Gradients where scripts freeze, step, throw away and break off at unusual moments, and keep what they were given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mirrored
from tests.support.branches import keep_models_on_one_tower
from tests.support.jobs import all_raise, make_data, make_mlp, parameters_of, towers
from tests.support.steps import averaging_step, equal_one_device, local_share


def step_without_sync(strategy: mirrored.Strategy) -> None:
    with strategy.scope():
        model = nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def step() -> None:
        with strategy.no_sync():
            model(torch.ones(1, 1)).sum().backward()
        optimizer.step()

    strategy.run(step)


def test_stepping_on_unaveraged_gradients_is_refused() -> None:
    all_raise(mirrored.MirrorError, r"Linear.*accumulated under no_sync", step_without_sync)


def freeze_between(strategy: mirrored.Strategy) -> list[float]:
    """Accumulated without sync, then frozen or thawed elsewhere, before the backward that averages."""
    with strategy.scope():
        model, other = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    r = strategy.topology.index
    with strategy.no_sync():
        strategy.run(lambda: (model.weight * (r + 1)).sum().backward())
    other.requires_grad_(False)
    strategy.run(lambda: (model.weight * 10 * (r + 1)).sum().backward())
    return [float(model.weight.grad)]


def test_freezing_does_not_forget_what_was_accumulated() -> None:
    assert towers(freeze_between) == [[16.5], [16.5]]


def step_inside_backward(strategy: mirrored.Strategy, after_the_first_run: bool) -> None:
    """An optimizer for each parameter, stepped by a hook, which comes before or after the strategy's own."""
    model = strategy.mirror(nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    if after_the_first_run:
        strategy.run(lambda: None)
    model.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    strategy.run(lambda: model(torch.ones(1, 1)).sum().backward())


@pytest.mark.parametrize("after_the_first_run", [False, True])
def test_stepping_inside_backward_is_refused(after_the_first_run: bool) -> None:
    words = r"optimizer.step\(\) before the gradients are averaged"
    all_raise(mirrored.MirrorError, words, step_inside_backward, after_the_first_run)


def train_and_freeze(strategy: mirrored.Strategy) -> list[Tensor]:
    """Body frozen from the start, thawed after two steps, head frozen after four; towers have 6 and 5 examples."""
    model = strategy.mirror(make_mlp())
    body, head = model[0], model[2]
    body.requires_grad_(False)
    step = averaging_step(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for i in range(6):
        if i == 2:
            body.requires_grad_(True)
        if i == 4:
            head.requires_grad_(False)
        strategy.run(step, args=local_share(strategy, *make_data(11)))
    return parameters_of(model)


@pytest.mark.row(31)
def test_freezing_and_thawing_equals_the_single_device_run() -> None:
    equal_one_device(train_and_freeze)


def go_on_after_a_broken_backward(strategy: mirrored.Strategy, how: str) -> None:
    model = strategy.mirror(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))

    def step(fail: bool) -> None:
        hidden = model[0](torch.ones(1, 1))
        if fail:
            hidden.register_hook(lambda _: 1 / 0)
        model[1](hidden).sum().backward()

    try:
        strategy.run(step, args=(True,))
    except ZeroDivisionError:
        if how == "a backward":
            strategy.run(step, args=(False,))
        else:
            strategy.mirror(nn.Linear(1, 1))
            strategy.run(lambda: None)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("a backward", r"backward\(\) on tower \d raised an exception"),
        ("another model", "restart from the last checkpoint"),
    ],
)
def test_going_on_after_a_broken_backward_is_refused(how: str, words: str) -> None:
    all_raise(mirrored.TowersError, words, go_on_after_a_broken_backward, how)


def convert_and_come_back(strategy: mirrored.Strategy) -> list[float]:
    model = strategy.mirror(nn.Linear(1, 1, bias=False))
    r = strategy.topology.index
    found = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        model.to(dtype)
        model.zero_grad()
        strategy.run(lambda dtype=dtype: model(torch.full((1, 1), r + 1.0, dtype=dtype)).sum().backward())
        assert model.weight.grad.dtype == dtype
        found.append(float(model.weight.grad))
    return found


def test_converting_a_model_between_steps() -> None:
    assert towers(convert_and_come_back) == [[1.5, 1.5, 1.5]] * 2


def train_models_in_turn(strategy: mirrored.Strategy) -> tuple[list[float], int]:
    """Models come and go under one strategy; those that are gone are forgotten."""
    r = strategy.topology.index
    found = []
    for _ in range(3):
        model = strategy.mirror(nn.Linear(1, 1, bias=False))
        strategy.run(lambda model=model: (model.weight * (r + 1)).sum().backward())
        found.append(float(model.weight.grad))
        del model
    return found, len(strategy.engine.averager.layout.slots)


def test_models_that_are_gone_are_forgotten() -> None:
    assert towers(train_models_in_turn) == [([1.5, 1.5, 1.5], 1)] * 2


def keep_gradients(strategy: mirrored.Strategy) -> list[float]:
    """As methods do that compare the gradients of several losses."""
    model = strategy.mirror(nn.Linear(1, 1, bias=False))
    r = strategy.topology.index

    def backward(factor: int) -> Tensor:
        model.zero_grad()
        (model.weight * factor * (r + 1)).sum().backward()
        return model.weight.grad

    kept = [strategy.run(backward, args=(factor,)) for factor in (1, 10, 100)]
    views = [strategy.run(backward, args=(factor,)).view(-1)[:1] for factor in (1, 10)]
    return [float(gradient) for gradient in kept + views]


def test_a_gradient_that_was_kept_does_not_change() -> None:
    assert towers(keep_gradients) == [[1.5, 15, 150, 1.5, 15]] * 2


@pytest.mark.parametrize("how", ["there and back", "channels last", "clamped"])
def test_gradients_whose_data_was_replaced(how: str) -> None:
    assert towers(replace_data, how) == [1.5, 1.5]


def replace_data(strategy: mirrored.Strategy, how: str) -> float:
    model = strategy.mirror(nn.Conv2d(2, 2, 2, bias=False))
    r = strategy.topology.index

    def backward() -> None:
        (model.weight * (r + 1)).sum().backward()

    strategy.run(backward)
    if how == "there and back":
        model.double().float()
    elif how == "channels last":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    else:
        model.weight.grad.data = model.weight.grad.data.clamp(-1, 1)
    model.zero_grad()
    strategy.run(backward)
    return float(model.weight.grad.flatten()[0])


@pytest.mark.parametrize("how", ["transposed", "exchanged"])
def test_gradients_whose_data_changes_within_their_bucket(how: str) -> None:
    assert towers(change_places, how) == [[[0.0, 1.5, 3.0, 4.5], [6.0, 7.5, 9.0, 10.5]]] * 2


def change_places(strategy: mirrored.Strategy, how: str) -> list[list[float]]:
    model = strategy.mirror(nn.ParameterList([torch.zeros(2, 2), torch.zeros(2, 2)]))
    factors = torch.arange(8.0).view(2, 2, 2) * (strategy.topology.index + 1)

    def backward() -> None:
        sum((parameter * factor).sum() for parameter, factor in zip(model, factors, strict=True)).backward()

    strategy.run(backward)
    first, second = (parameter.grad for parameter in model)
    if how == "transposed":
        first.data = first.data.t()
    else:
        first.data, second.data = second.data, first.data
    del first, second
    model.zero_grad()
    strategy.run(backward)
    return [parameter.grad.flatten().tolist() for parameter in model]


BY_BOTH = pytest.mark.parametrize("implementation", ["shared_memory", "gloo"])


def by(implementation: str, fn: Callable[[mirrored.Strategy], Any]) -> list[Any]:
    return towers(fn, settings={"communication": mirrored.CommunicationOptions(implementation=implementation)})


@BY_BOTH
def test_gradients_whose_data_a_hook_replaces(implementation: str) -> None:
    """The large gradient is copied before the hook of the small one runs."""
    assert by(implementation, replace_data_in_a_hook) == [[[2.25, 1.5], [5.625, 3.0]]] * 2


def replace_data_in_a_hook(strategy: mirrored.Strategy) -> list[list[float]]:
    """Returns an element of each gradient, after each of two backwards that add up their gradients."""
    model = nn.ParameterList([torch.zeros(2), torch.zeros(2**16)])

    def multiply(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.data = parameter.grad.data * 1.5

    model[0].register_post_accumulate_grad_hook(multiply)
    strategy.mirror(model)
    r = strategy.topology.index
    found = []
    for _ in range(2):
        strategy.run(lambda: ((model[0] * (r + 1)).sum() + (model[1] * (r + 1)).sum()).backward())
        found.append([float(p.grad[0]) for p in model])
    return found


@BY_BOTH
def test_a_parameter_is_given_the_same_gradient_again(implementation: str) -> None:
    assert by(implementation, watch_gradients) == [(1, 1, 1)] * 2


def watch_gradients(strategy: mirrored.Strategy) -> tuple[int, ...]:
    """Returns the number of different gradients of a parameter, over several backwards of three kinds."""
    model = strategy.mirror(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))

    def backward() -> int:
        model(torch.ones(1, 2)).sum().backward()
        return id(model[0].weight.grad)

    def fresh() -> int:
        model.zero_grad()
        return strategy.run(backward)

    def accumulated() -> int:
        with strategy.no_sync():
            fresh()
        return strategy.run(backward)

    fresh()
    kinds = (fresh, lambda: strategy.run(backward), accumulated)
    return tuple(len({step() for _ in range(4)}) for step in kinds)


def alternate_what_is_trained(strategy: mirrored.Strategy, first: int, second: int) -> float:
    """Thaws and freezes inside the step, as a GAN's does; returns the largest error of any gradient."""
    with strategy.scope():
        one = nn.ParameterList([nn.Parameter(torch.zeros(10)) for _ in range(first)])
        two = nn.ParameterList([nn.Parameter(torch.zeros(10)) for _ in range(second)])
    one.requires_grad_(False)
    r = strategy.topology.index

    def backward(learning: nn.ParameterList, other: nn.ParameterList) -> float:
        learning.requires_grad_(True)
        other.requires_grad_(False)
        learning.zero_grad()
        everything = torch.cat([*learning, *other])
        (everything * (r + 1)).sum().backward()
        return max(float((p.grad - 1.5).abs().max()) for p in learning if p.grad is not None)

    def step() -> float:
        return max(backward(one, two), backward(two, one))

    return max(strategy.run(step) for _ in range(3))


def test_thawing_inside_the_step() -> None:
    """Parameters of both kinds share a bucket, or lie in several."""
    assert towers(alternate_what_is_trained, 20, 5) == [0, 0]
    assert towers(alternate_what_is_trained, 1, 1) == [0, 0]


def throw_away_what_was_accumulated(strategy: mirrored.Strategy) -> list[float | None]:
    """Accumulated without sync and dropped; then one tower alone uses the parameter."""
    with strategy.scope():
        dropped, used = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    r = strategy.topology.index
    optimizer = torch.optim.SGD(dropped.parameters(), lr=1.0)
    with strategy.no_sync():
        strategy.run(lambda: (dropped.weight + used.weight).sum().backward())
    dropped.zero_grad()
    used.zero_grad()
    strategy.run(optimizer.step)  # there is nothing of this tower's own left to refuse
    strategy.run(lambda: (dropped.weight + used.weight if r else used.weight).sum().backward())
    return [None if p.grad is None else float(p.grad) for p in (dropped.weight, used.weight)]


def test_gradients_that_were_thrown_away_are_not_averaged() -> None:
    assert towers(throw_away_what_was_accumulated) == [[0.5, 1.0]] * 2


def test_towers_may_keep_different_old_models() -> None:
    assert towers(keep_models_on_one_tower) == [[1.5] * 3] * 2
