"""Losses under torch.func's transforms and torch.compile, and functions whose body runs later."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.data import TensorDataset

import mirrored
from tests.support.jobs import make_data, make_mlp, text_of, towers

EXAMPLES = 7

Parameters = dict[str, Tensor]


def in_run(strategy: mirrored.Strategy, fn: Callable[[torch.nn.Module, Tensor, Tensor], Any]) -> Any:
    """What ``fn(model, x, y)`` returns in a run over a batch of 7 examples."""
    model = strategy.mirror(make_mlp())
    [batch] = list(strategy.distribute_dataset(TensorDataset(*make_data(EXAMPLES)), EXAMPLES))
    return strategy.run(lambda x, y: fn(model, x, y), args=batch)


def transformed(strategy: mirrored.Strategy) -> dict[str, Tensor]:
    """Derivatives by every transform, averaged over the towers."""

    def derive(model: torch.nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        p = {name: tensor.detach() for name, tensor in model.named_parameters()}
        ones = {name: torch.ones_like(tensor) for name, tensor in p.items()}
        weight = p["2.bias"]

        def loss(p: Parameters, **options: Any) -> Tensor:
            per_example = F.cross_entropy(functional_call(model, p, (x,)), y, reduction="none")
            penalty = sum((tensor.square().sum() for tensor in p.values()), torch.zeros(()))
            penalty_share = mirrored.scale_regularization_loss(0.1 * penalty)
            return mirrored.compute_average_loss(per_example, **options) + penalty_share

        def loss_of_one(p: Parameters, x: Tensor, y: Tensor) -> Tensor:
            per_example = F.cross_entropy(functional_call(model, p, (x[None],)), y[None], reduction="none")
            return mirrored.compute_average_loss(per_example, global_batch_size=EXAMPLES)

        def weighted(p: Parameters) -> Tensor:
            per_example = F.cross_entropy(functional_call(model, p, (x,)), y, reduction="none")
            return mirrored.compute_average_loss(per_example, x[:, 0].abs(), denominator="weights")

        def of_bias(bias: Tensor) -> Tensor:
            return loss({**p, "2.bias": bias})

        direction = torch.linspace(-1, 1, 3, dtype=torch.float64)
        per_example = vmap(grad(loss_of_one), (None, 0, 0))(p, x, y)
        return {
            "grad": grad(loss)(p)["0.weight"],
            "over weights": grad(weighted)(p)["0.weight"],
            "over weights, forward": jvp(weighted, (p,), (ones,))[1],
            "vjp": vjp(loss, p)[1](torch.tensor(2.0, dtype=torch.float64))[0]["0.weight"],
            "jvp": jvp(loss, (p,), (ones,))[1],
            "jacrev": jacrev(of_bias)(weight),
            "jacfwd": jacfwd(of_bias)(weight),
            "hessian": hessian(of_bias)(weight),
            "of an ensemble": vmap(grad(of_bias))(torch.stack([weight, 2 * weight])),
            "per example": per_example["2.bias"].sum(0),
            "product with the hessian": jvp(grad(of_bias), (weight,), (direction,))[1],
        }

    found = in_run(strategy, derive)
    return {name: strategy.reduce("mean", value) for name, value in found.items()}


def test_derivatives_by_transforms_are_those_of_the_global_mean() -> None:
    expected = transformed(mirrored.OneDeviceStrategy())
    for found in towers(transformed):
        assert found.keys() == expected.keys()
        for name, value in found.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-14, msg=name)


def not_finite(strategy: mirrored.Strategy) -> list[float]:
    """Value and gradient of losses that are not finite, as they are and compiled."""

    def losses(scale: Tensor) -> Tensor:
        return mirrored.compute_average_loss(scale.expand(2), global_batch_size=1)

    def derive(model: torch.nn.Module, x: Tensor, y: Tensor) -> list[float]:
        found: list[float] = []
        for fn in (losses, torch.compile(losses, fullgraph=True, backend="aot_eager")):
            for value in (math.inf, -math.inf, math.nan, 1e308, 3.0):
                scale = torch.tensor(value, dtype=torch.float64, requires_grad=True)
                loss = fn(scale)
                loss.backward()
                found += [loss.item(), scale.grad.item()]
        return found

    result: list[float] = in_run(strategy, derive)
    return result


def test_losses_that_are_not_finite_stay_what_they_are() -> None:
    values = (math.inf, -math.inf, math.nan, math.inf, 6.0)
    expected = [number for value in values for number in (value, 4.0)] * 2  # 2 entries, 2 towers
    for found in towers(not_finite):
        assert found == pytest.approx(expected, nan_ok=True)


def compiled(strategy: mirrored.Strategy, options: dict[str, Any]) -> list[tuple[float, Tensor]]:
    """Losses and gradients of one batch after the other, as they are and in one graph."""
    with strategy.scope():
        model = make_mlp()

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        per_example = F.cross_entropy(model(x), y, reduction="none")
        weight = {"sample_weight": x[:, 0].abs()} if options else {}
        loss = mirrored.compute_average_loss(per_example, **weight, **options)
        return loss + mirrored.scale_regularization_loss(model[0].weight.square().sum())

    graph = torch.compile(loss_of, fullgraph=True, backend="aot_eager")
    data = strategy.distribute_dataset(TensorDataset(*make_data(21)), 8)

    def step(x: Tensor, y: Tensor) -> list[tuple[float, Tensor]]:
        found = []
        for fn in (loss_of, graph):
            model.zero_grad()
            loss = fn(x, y)
            loss.backward()
            found.append((loss.item(), model[0].weight.grad.clone()))
        return found

    return [pair for batch in data for pair in strategy.run(step, args=batch)]


def both_compiled(strategy: mirrored.Strategy) -> list[tuple[float, Tensor]]:
    return [*compiled(strategy, {}), *compiled(strategy, {"denominator": "weights"})]


@pytest.mark.extended
def test_losses_in_one_graph() -> None:
    alone = both_compiled(mirrored.OneDeviceStrategy())
    found = towers(both_compiled)
    assert len(alone) == 12
    for results in (alone, *found):
        for (loss, gradient), (in_graph, its_gradient) in zip(results[::2], results[1::2], strict=True):
            assert in_graph == pytest.approx(loss, rel=1e-12)
            torch.testing.assert_close(its_gradient, gradient, rtol=1e-12, atol=1e-14)
    for i in range(len(alone)):
        assert sum(results[i][0] for results in found) == pytest.approx(alone[i][0], rel=1e-12)
        torch.testing.assert_close(found[0][i][1], alone[i][1], rtol=1e-12, atol=1e-14)


def compiled_with_stand_ins(strategy: mirrored.Strategy) -> list[tuple[float, Tensor]]:
    """Two batches a step, of which the one that is meant has 2 examples: on the third tower a stand-in."""
    with strategy.scope():
        model = make_mlp()

    def loss_of(x: Tensor, y: Tensor, other: Tensor) -> Tensor:
        per_example = F.cross_entropy(model(x), y, reduction="none")
        losses = [
            mirrored.compute_average_loss(per_example, batch=x),
            mirrored.compute_average_loss(per_example, 2 * x[:, 0], batch=x, denominator="weights"),
            mirrored.compute_average_loss(per_example.detach() * math.inf, global_batch_size=2, batch=x),
            mirrored.compute_average_loss(per_example, batch=()),
            mirrored.compute_average_loss(other.square().sum(1), batch=other),
        ]
        return torch.stack(losses)

    x, y = make_data(2)
    data = strategy.distribute_dataset(TensorDataset(x.abs(), y), 2, stand_in=True)
    others = strategy.distribute_dataset(TensorDataset(make_data(3)[0]), 3, stand_in=True)
    graph = torch.compile(loss_of, fullgraph=True, backend="aot_eager")

    def step(x: Tensor, y: Tensor, other: Tensor) -> list[tuple[Tensor, Tensor]]:
        found = []
        for fn in (loss_of, graph):
            model.zero_grad()
            losses = fn(x, y, other)
            losses[[0, 1, 3]].sum().backward()
            found.append((losses.detach(), model[0].weight.grad.clone()))
        return found

    [found] = [strategy.run(step, args=(x, y, other)) for (x, y), (other,) in zip(data, others, strict=True)]
    return found


@pytest.mark.extended
def test_losses_of_stand_ins_in_one_graph() -> None:
    results = towers(compiled_with_stand_ins, count=3)
    for (losses, gradient), (in_graph, its_gradient) in results:
        torch.testing.assert_close(in_graph, losses, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(its_gradient, gradient, rtol=1e-12, atol=1e-14)
    assert results[2][1][0][:3].tolist() == [0.0, 0.0, 0.0], "a stand-in's losses are exact zeros, even if infinite"
    assert results[2][1][0][3] > 0
    [(alone, _), _] = compiled_with_stand_ins(mirrored.OneDeviceStrategy())
    total = sum(result[1][0] for result in results)
    torch.testing.assert_close(total[[0, 1, 4]], alone[[0, 1, 4]], rtol=1e-12, atol=1e-14)


def loss_of_a_batch_from_elsewhere(strategy: mirrored.Strategy) -> str:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss(x: Tensor) -> Tensor:
        return mirrored.compute_average_loss(x.repeat(2))

    [(x,)] = list(strategy.distribute_dataset(TensorDataset(torch.rand(5)), 5))
    return text_of(ValueError, strategy.run, loss, args=(x,))


def test_a_loss_that_does_not_fit_its_batch_is_refused_in_a_graph_too() -> None:
    text, _ = towers(loss_of_a_batch_from_elsewhere)
    assert "the loss has 6 entries, but this tower's part of the distributed batch has 3 of 5" in text


def a_generator(x: int) -> Any:
    yield x


async def a_coroutine(x: int) -> int:
    return x


async def an_async_generator(x: int) -> Any:
    yield x


class Step:
    def __call__(self, x: int) -> Any:
        yield x


@pytest.mark.parametrize(
    ("fn", "kind"),
    [
        (a_generator, "generator"),
        (lambda x: a_generator(x), "generator"),
        (Step(), "generator"),
        (a_coroutine, "coroutine"),
        (an_async_generator, "async generator"),
    ],
)
def test_functions_whose_body_runs_later_are_refused(fn: Callable[..., Any], kind: str) -> None:
    with pytest.raises(TypeError, match=rf"returned a {kind}.*after strategy.run has returned"):
        mirrored.OneDeviceStrategy().run(fn, args=(1,))
