"""Hooks of the script's on gradients, gradients with a graph or of another dtype, parameters that are frozen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mirrored
from tests.support.jobs import assert_close, failures, make_data, make_mlp, towers
from tests.support.waiting import HANG

BACKENDS: dict[str, dict[str, Any]] = {
    "shared memory": {},
    "gloo": {"communication": mirrored.CommunicationOptions(implementation="gloo")},
    "sharded": {"shard_optimizer": True},
}


def _multiply(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.mul_(3)


def _multiply_data(p: Tensor) -> None:
    assert p.grad is not None
    p.grad.data.mul_(3)


def _replace(p: Tensor) -> None:
    assert p.grad is not None
    p.grad = p.grad * 3


HOOKS: dict[str, Callable[[Tensor], None]] = {"mul_": _multiply, "data.mul_": _multiply_data, "replaced": _replace}


def _wide() -> nn.Sequential:
    """A model with a parameter that is large enough to be brought into its bucket at once."""
    with torch.random.fork_rng(), torch.device("cpu"):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 4096), nn.Tanh(), nn.Linear(4096, 3)).to(torch.float64)


def _gradients(model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    nn.functional.cross_entropy(model(x), y).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _with_late_hooks(backend: str) -> dict[str, list[list[Tensor]]]:
    """Of each kind of hook, the gradients of the step in which it is registered and of the one after that."""
    strategy = mirrored.MirroredStrategy(seed=0, **BACKENDS[backend])
    x, y = make_data(8)
    index = strategy.topology.index
    found = {}
    for name, hook in HOOKS.items():
        model = strategy.mirror(_wide())

        def step(model: nn.Module = model, register: Any = None) -> list[Tensor]:
            model.zero_grad()
            for parameter in model.parameters() if register else ():
                parameter.register_post_accumulate_grad_hook(register)
            return _gradients(model, x[4 * index : 4 * index + 4], y[4 * index : 4 * index + 4])

        strategy.run(step)
        found[name] = [strategy.run(step, kwargs={"register": hook}), strategy.run(step)]
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_hooks_that_were_registered_after_the_first_run_change_what_is_averaged(backend: str) -> None:
    expected = [3 * gradient for gradient in _gradients(_wide(), *make_data(8))]
    for found in mirrored.launch(_with_late_hooks, (backend,), devices=["cpu:0", "cpu:1"]):
        for gradients in found.values():
            assert_close(gradients[0], expected, 1e-12)
            assert_close(gradients[1], expected, 1e-12)


def _one_changes_another(backend: str, replace: bool) -> None:
    settings = dict(BACKENDS[backend])
    implementation = "gloo" if backend == "gloo" else "auto"
    settings["communication"] = mirrored.CommunicationOptions(implementation=implementation, bucket_bytes=64)
    strategy = mirrored.MirroredStrategy(seed=0, **settings)
    model = strategy.mirror(make_mlp())
    x, y = make_data(4)

    def meddle(_: Tensor) -> None:
        last = model[2].weight
        assert isinstance(last, Tensor)
        assert last.grad is not None
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("replace", [False, True])
def test_a_gradient_that_is_changed_on_its_way_is_an_error(backend: str, replace: bool) -> None:
    with pytest.raises(
        mirrored.TowerFailedError, match=r"Sequential\.2\.weight.*was changed on tower \d during backward"
    ):
        mirrored.launch(_one_changes_another, (backend, replace), devices=["cpu:0", "cpu:1"], timeout=HANG)


def _penalty_on_gradients(strategy: mirrored.Strategy, sparse: bool) -> None:
    model = strategy.mirror(nn.Sequential(nn.Embedding(7, 5, sparse=sparse), nn.Linear(5, 3)))

    def step() -> None:
        loss = model(torch.arange(7)).square().sum()
        loss.backward(create_graph=True)
        sum(p.grad.square().sum() for p in model.parameters() if p.grad is not None).backward()

    strategy.run(step)


def test_gradients_with_a_graph_are_refused() -> None:
    for error in failures(_penalty_on_gradients, False):
        assert isinstance(error, mirrored.TowersError)
        assert "create_graph=True) gave parameter Sequential.1." in str(error)
        assert "torch.autograd.grad(loss, parameters, create_graph=True)" in str(error)


def _penalty_by_autograd_grad(strategy: mirrored.Strategy) -> list[Tensor]:
    model = strategy.mirror(make_mlp())
    x, y = make_data(8)
    own = slice(4 * strategy.topology.index, 4 * strategy.topology.index + 4)

    def step() -> None:
        loss = nn.functional.cross_entropy(model(x[own]), y[own])
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        (loss + sum(gradient.square().sum() for gradient in gradients)).backward()

    strategy.run(step)
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_the_way_that_the_error_names_works() -> None:
    x, y = make_data(8)
    expected = []
    for part in (slice(0, 4), slice(4, 8)):
        model = make_mlp()
        loss = nn.functional.cross_entropy(model(x[part]), y[part])
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        total = loss + sum(gradient.square().sum() for gradient in gradients)
        expected.append(torch.autograd.grad(total, list(model.parameters())))
    for gradients in towers(_penalty_by_autograd_grad):
        assert_close(gradients, [(a + b) / 2 for a, b in zip(*expected, strict=True)], 1e-12)


def _frozen_on_one_tower(strategy: mirrored.Strategy, backend: str) -> None:
    model = strategy.mirror(make_mlp())
    x, y = make_data(4)

    def step() -> None:
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()

    strategy.run(step)
    if strategy.topology.index == 1:
        model[0].weight.requires_grad_(False)
    strategy.run(step)
    strategy.reduce("sum", 1.0)


def _frozen_on(backend: str) -> None:
    _frozen_on_one_tower(mirrored.MirroredStrategy(seed=0, **BACKENDS[backend]), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_parameter_that_is_frozen_on_one_tower_alone_is_an_error(backend: str) -> None:
    with pytest.raises(mirrored.TowerFailedError, match=r"Sequential\.0\.weight is frozen .* on tower 1, but another"):
        mirrored.launch(_frozen_on, (backend,), devices=["cpu:0", "cpu:1"], timeout=HANG)


def _frozen_between_forward_and_backward() -> list[list[Tensor | None]]:
    strategy = mirrored.MirroredStrategy(communication=mirrored.CommunicationOptions(bucket_bytes=64))
    model = strategy.mirror(make_mlp())
    x, y = make_data(8)
    own = slice(4 * strategy.topology.index, 4 * strategy.topology.index + 4)
    found = []

    def step(frozen: bool) -> None:
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(x[own]), y[own])
        model[2].bias.requires_grad_(not frozen)
        loss.backward()
        model[2].bias.requires_grad_(True)
        found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])

    for frozen in (False, True, True, False):
        strategy.run(step, args=(frozen,))
    return found


def test_a_parameter_that_is_frozen_between_forward_and_backward_gets_no_gradient() -> None:
    expected = _gradients(make_mlp(), *make_data(8))
    for found in mirrored.launch(_frozen_between_forward_and_backward, devices=["cpu:0", "cpu:1"]):
        for gradients, frozen in zip(found, (False, True, True, False), strict=True):
            assert (gradients[3] is None) == frozen
            kept = [gradient for gradient in gradients if gradient is not None]
            assert_close(kept, expected[:3] if frozen else expected, 1e-12)


def _wide_gradients(backend: str) -> list[list[Tensor]]:
    """Half-precision parameters whose gradients are accumulated, averaged and used in float32 and float64."""
    strategy = mirrored.MirroredStrategy(seed=0, **BACKENDS[backend])
    with strategy.scope():
        model = make_mlp(torch.bfloat16)
        for number, parameter in enumerate(model.parameters()):
            parameter.grad_dtype = torch.float64 if number % 2 else torch.float32
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = make_data(8, torch.bfloat16)
    own = slice(4 * strategy.topology.index, 4 * strategy.topology.index + 4)
    found = []

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(2):
            nn.functional.cross_entropy(model(x[own]), y[own]).backward()
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        optimizer.step()

    for _ in range(3):
        strategy.run(step)
    return [found[0], [p.detach().clone() for p in model.parameters()]]


@pytest.mark.skipif(not hasattr(Tensor, "grad_dtype"), reason="not in this version of torch")
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_keep_the_dtype_that_parameters_ask_for(backend: str) -> None:
    x, y = make_data(8, torch.bfloat16)
    both = []
    for part in (slice(0, 4), slice(4, 8)):
        model = make_mlp(torch.bfloat16)
        for number, parameter in enumerate(model.parameters()):
            parameter.grad_dtype = torch.float64 if number % 2 else torch.float32
        both.append(_gradients(model, x[part], y[part]))
    expected = [a + b for a, b in zip(*both, strict=True)]  # the mean of the towers', twice
    results = mirrored.launch(_wide_gradients, (backend,), devices=["cpu:0", "cpu:1"])
    for gradients, _ in results:
        assert [gradient.dtype for gradient in gradients] == [torch.float32, torch.float64] * 2
        assert_close(gradients, expected, 1e-6)
    assert_close(results[0][1], results[1][1], 0)
