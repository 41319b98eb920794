"""Hooks of the script's on gradients, gradients with a graph or of another dtype, parameters that are frozen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mirrored
from tests.support.jobs import SETTINGS, all_raise, assert_close, make_data, make_mlp, parameters_of, seeded, towers
from tests.support.steps import gradients_of, local_share


def _multiply(p: Tensor) -> None:
    p.grad.mul_(3)


def _multiply_data(p: Tensor) -> None:
    p.grad.data.mul_(3)


def _replace(p: Tensor) -> None:
    p.grad = p.grad * 3


HOOKS: dict[str, Callable[[Tensor], None]] = {"mul_": _multiply, "data.mul_": _multiply_data, "replaced": _replace}


def _wide() -> nn.Sequential:
    """A model with a parameter that is large enough to be brought into its bucket at once."""
    return seeded(lambda: nn.Sequential(nn.Linear(5, 4096), nn.Tanh(), nn.Linear(4096, 3)).double())


def _gradients(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    nn.functional.cross_entropy(model(x), y).backward()
    return gradients_of(model)


def _with_late_hooks(strategy: mirrored.Strategy) -> dict[str, list[list[Tensor]]]:
    """Of each kind of hook, the gradients of the step in which it is registered and of the one after that."""
    found = {}
    for name, hook in HOOKS.items():
        model = strategy.mirror(_wide())

        def step(model: nn.Module = model, register: Any = None) -> list[Tensor]:
            model.zero_grad()
            for parameter in model.parameters() if register else ():
                parameter.register_post_accumulate_grad_hook(register)
            return _gradients(model, *local_share(strategy, *make_data(8)))

        strategy.run(step)
        found[name] = [strategy.run(step, kwargs={"register": hook}), strategy.run(step)]
    return found


@pytest.mark.parametrize("backend", SETTINGS)
def test_hooks_that_were_registered_after_the_first_run_change_what_is_averaged(backend: str) -> None:
    expected = [3 * gradient for gradient in _gradients(_wide(), *make_data(8))]
    for found in towers(_with_late_hooks, settings=SETTINGS[backend]):
        for gradients in found.values():
            assert_close(gradients[0], expected, 1e-12)
            assert_close(gradients[1], expected, 1e-12)


def _one_changes_another(strategy: mirrored.Strategy, replace: bool) -> None:
    model = strategy.mirror(make_mlp())
    x, y = make_data(4)

    def meddle(_: Tensor) -> None:
        last = model[2].weight
        if replace:
            last.grad = last.grad * 3
        else:
            last.grad.mul_(3)

    def step() -> None:
        nn.functional.cross_entropy(model(x), y).backward()

    for _ in range(2):
        strategy.run(step)
        model.zero_grad()
    # The last layer's gradient comes first: its bucket is on its way when the first layer's gradient comes.
    model[0].bias.register_post_accumulate_grad_hook(meddle)
    strategy.run(step)


@pytest.mark.parametrize("backend", SETTINGS)
@pytest.mark.parametrize("replace", [False, True])
def test_a_gradient_that_is_changed_on_its_way_is_an_error(backend: str, replace: bool) -> None:
    implementation = "gloo" if backend == "gloo" else "auto"
    small = {"communication": mirrored.CommunicationOptions(implementation=implementation, bucket_bytes=64)}
    words = r"Sequential\.2\.weight.*was changed on tower \d during backward"
    with pytest.raises(mirrored.TowerFailedError, match=words):
        towers(_one_changes_another, replace, settings={**SETTINGS[backend], **small})


def _penalty_on_gradients(strategy: mirrored.Strategy) -> None:
    model = strategy.mirror(nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 3)))

    def step() -> None:
        loss = model(torch.arange(7)).square().sum()
        loss.backward(create_graph=True)
        sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None).backward()

    strategy.run(step)


def test_gradients_with_a_graph_are_refused() -> None:
    words = r"create_graph=True\) gave parameter Sequential.1."
    for text in all_raise(mirrored.TowersError, words, _penalty_on_gradients):
        assert "torch.autograd.grad(loss, parameters, create_graph=True)" in text


def _penalised(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(model(x), y)
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + sum(gradient.square().sum() for gradient in gradients)


def _penalty_by_autograd_grad(strategy: mirrored.Strategy) -> list[Tensor]:
    model = strategy.mirror(make_mlp())
    strategy.run(lambda: _penalised(model, *local_share(strategy, *make_data(8))).backward())
    return gradients_of(model)


def test_the_way_that_the_error_names_works() -> None:
    model, (x, y) = make_mlp(), make_data(8)
    ((_penalised(model, x[:4], y[:4]) + _penalised(model, x[4:], y[4:])) / 2).backward()
    for gradients in towers(_penalty_by_autograd_grad):
        assert_close(gradients, gradients_of(model), 1e-12)


def _frozen_on_one_tower(strategy: mirrored.Strategy) -> None:
    model = strategy.mirror(make_mlp())
    strategy.run(_gradients, args=(model, *make_data(4)))
    model.zero_grad()
    if strategy.topology.index == 1:
        model[0].weight.requires_grad_(False)
    strategy.run(_gradients, args=(model, *make_data(4)))
    strategy.reduce("sum", 1.0)


@pytest.mark.extended
@pytest.mark.parametrize("backend", SETTINGS)
def test_a_parameter_that_is_frozen_on_one_tower_alone_is_an_error(backend: str) -> None:
    with pytest.raises(mirrored.TowerFailedError, match=r"Sequential\.0\.weight is frozen .* on tower 1, but another"):
        towers(_frozen_on_one_tower, settings=SETTINGS[backend])


FROZEN = (False, True, True, False)


def _frozen_between_forward_and_backward(strategy: mirrored.Strategy) -> list[list[Tensor | None]]:
    model = strategy.mirror(make_mlp())
    x, y = local_share(strategy, *make_data(8))

    def step(frozen: bool) -> list[Tensor | None]:
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        model[2].bias.requires_grad_(not frozen)
        loss.backward()
        model[2].bias.requires_grad_(True)
        return [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    return [strategy.run(step, args=(frozen,)) for frozen in FROZEN]


def test_a_parameter_that_is_frozen_between_forward_and_backward_gets_no_gradient() -> None:
    expected = _gradients(make_mlp(), *make_data(8))
    small = {"communication": mirrored.CommunicationOptions(bucket_bytes=64)}
    for found in towers(_frozen_between_forward_and_backward, settings=small):
        for gradients, frozen in zip(found, FROZEN, strict=True):
            assert (gradients[3] is None) == frozen
            kept = [gradient for gradient in gradients if gradient is not None]
            assert_close(kept, expected[:3] if frozen else expected, 1e-12)


def _half_precision() -> nn.Sequential:
    """Parameters whose gradients are float32 and float64 in turn."""
    model = make_mlp(torch.bfloat16)
    for number, parameter in enumerate(model.parameters()):
        parameter.grad_dtype = torch.float64 if number % 2 else torch.float32
    return model


def _wide_gradients(strategy: mirrored.Strategy) -> list[list[Tensor]]:
    """Half-precision parameters whose gradients are accumulated, averaged and used in float32 and float64."""
    model = strategy.mirror(_half_precision())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = local_share(strategy, *make_data(8, torch.bfloat16))

    def step() -> list[Tensor]:
        optimizer.zero_grad()
        _gradients(model, x, y)
        gradients = _gradients(model, x, y)
        optimizer.step()
        return gradients

    first, *_ = [strategy.run(step) for _ in range(3)]
    return [first, parameters_of(model)]


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="not in this version of torch")
@pytest.mark.parametrize("backend", SETTINGS)
def test_gradients_keep_the_dtype_that_parameters_ask_for(backend: str) -> None:
    x, y = make_data(8, torch.bfloat16)
    both = [_gradients(_half_precision(), x[part], y[part]) for part in (slice(0, 4), slice(4, 8))]
    expected = [a + b for a, b in zip(*both, strict=True)]  # the mean of the towers', twice
    results = towers(_wide_gradients, settings=SETTINGS[backend])
    for gradients, _ in results:
        assert [gradient.dtype for gradient in gradients] == [torch.float32, torch.float64] * 2
        assert_close(gradients, expected, 1e-6)
    assert_close(results[0][1], results[1][1], 0)
