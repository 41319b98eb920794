"""Gradients that a script takes or puts into ``p.grad`` itself, and the barrier."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import mirrored
from tests.support.jobs import WAYS, all_raise, assert_close, make_data, make_mlp, seeded, towers

Inputs = list[Tensor]


class Mixed(nn.Module):
    """Parameters of several dtypes and kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 5, sparse=True, dtype=torch.float64)
        self.body = make_mlp()
        self.single = nn.Parameter(torch.ones(3))
        self.waves = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))
        self.narrow = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.last = nn.Conv2d(3, 2, 2, dtype=torch.float64).to(memory_format=torch.channels_last)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        body = self.body(x + self.words(y))
        images = x[:, :1, None, None].expand(-1, 3, 3, 3).contiguous(memory_format=torch.channels_last)
        rest = self.single.sum() + (self.waves * self.waves.conj()).real.sum() + self.narrow.float().square().sum()
        return body.square().sum(1) + self.last(images).mean((1, 2, 3)) + rest * x[:, 0]


def taken(strategy: mirrored.Strategy, how: str) -> list[Tensor | None]:
    """The gradients of the global mean for 7 examples, taken in one of several ways."""
    model = strategy.mirror(seeded(Mixed))
    data = strategy.distribute_dataset(TensorDataset(*make_data(7)), 7)
    parameters = list(model.parameters())

    def step(x: Tensor, y: Tensor) -> None:
        loss = mirrored.compute_average_loss(model(x, y))
        if how == "backward":
            loss.backward()
            return
        if how == "grad":
            before = torch.full_like(model.single, 5.0)
            model.single.grad = before
            gradients = strategy.grad(loss, iter(parameters), allow_unused=True)
            assert model.single.grad is before
            assert all(p.grad is None for p in parameters if p is not model.single), "p.grad is left alone"
        else:
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        if how == "average":
            kept = model.body[0].weight.grad
            strategy.average_gradients(parameters)
            assert model.body[0].weight.grad is kept, "averaged in place"

    [batch] = list(data)
    strategy.run(step, args=batch)
    return [None if p.grad is None else p.grad.detach() for p in parameters]


@pytest.mark.parametrize("how", ["grad", "average"])
@pytest.mark.parametrize("count", [2, 3])
def test_gradients_of_a_script_are_averaged_as_backward_does(how: str, count: int) -> None:
    alone = taken(mirrored.OneDeviceStrategy(), how)
    by_backward = towers(taken, "backward", count=count)
    for found, expected in zip(towers(taken, how, count=count), by_backward, strict=True):
        assert [g is None for g in found] == [g is None for g in expected] == [g is None for g in alone]
        for mean, other, single in zip(found, expected, alone, strict=True):
            if mean is None or other is None or single is None:
                continue
            assert (mean.dtype, mean.shape, mean.is_sparse) == (other.dtype, other.shape, other.is_sparse)
            dense, reference, one = (g.to_dense() if g.is_sparse else g for g in (mean, other, single))
            torch.testing.assert_close(dense, reference, rtol=1e-14, atol=1e-15)
            tolerance = {torch.float64: 1e-12, torch.bfloat16: 1e-2}.get(mean.dtype, 1e-5)
            torch.testing.assert_close(dense, one, rtol=tolerance, atol=tolerance)


def partly(strategy: mirrored.Strategy) -> list[Any]:
    """Tower 0 uses two of three inputs, tower 1 the middle one only; empty shares; an expanded gradient."""
    tower = strategy.topology.index
    a, b, c = (torch.full((2,), 1.0 + i, requires_grad=True) for i in range(3))
    loss = 2 * b.sum() + (a.square().sum() if tower == 0 else 0)
    found = strategy.grad(loss, (a, b, c), allow_unused=True, retain_graph=True)
    zeros = strategy.grad(loss, [a, c], materialize_grads=True)
    weighted = strategy.grad([b * 3, b], b, grad_outputs=[torch.ones(2), torch.ones(2)])
    a.grad, b.grad = (torch.full((2,), 4.0) if tower == 0 else None), torch.ones(()).expand(2)
    strategy.average_gradients(p for p in (a, b, c))
    after = [a.grad, b.grad, c.grad]
    strategy.average_gradients(a)
    return [found, zeros, weighted, after, a.grad]


def test_unused_on_all_towers_is_none_and_on_some_is_zero() -> None:
    for found, zeros, weighted, after, again in towers(partly):
        assert found[0].tolist() == [1.0, 1.0]
        assert found[1].tolist() == [2.0, 2.0]
        assert found[2] is None
        assert [g.tolist() for g in zeros] == [[1.0, 1.0], [0.0, 0.0]]
        assert weighted[0].tolist() == [4.0, 4.0]
        assert [None if g is None else g.tolist() for g in after] == [[2.0, 2.0], [1.0, 1.0], None]
        assert again.tolist() == [2.0, 2.0]


def trained(strategy: mirrored.Strategy, how: str) -> list[Tensor]:
    with strategy.scope():
        model = make_mlp()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    data = strategy.distribute_dataset(TensorDataset(*make_data(22)), 8)
    parameters = list(model.parameters())

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss = mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none"))
        if how == "backward":
            loss.backward()
        elif how == "no_sync":
            with strategy.no_sync():
                loss.backward()
            strategy.average_gradients(parameters)
        else:
            take = torch.autograd.grad if how == "average" else strategy.grad
            for p, gradient in zip(parameters, take(loss, parameters), strict=True):
                p.grad = gradient
            if how == "average":
                strategy.average_gradients(parameters)
        optimizer.step()

    for batch in data:
        strategy.run(step, args=batch)
    strategy.check_mirrored()
    return [p.detach() for p in parameters]


@pytest.mark.parametrize("setting", WAYS)
def test_training_by_own_gradients(setting: str) -> None:
    expected = trained(mirrored.OneDeviceStrategy(), "backward")
    for how in ("grad", "average", "no_sync") if setting != "virtual towers" else ("grad",):
        for parameters in towers(trained, how, settings=WAYS[setting]):
            assert_close(parameters, expected, 1e-12)


def averaged_in_large_numbers(strategy: mirrored.Strategy, count: int) -> list[float]:
    with strategy.scope():
        model = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(count)])

    def step() -> None:
        for p in model:
            p.grad = torch.full((1,), float(strategy.topology.index))
        strategy.average_gradients(model)

    strategy.run(step)
    return [float(p.grad) for p in model]


def test_any_number_of_gradients_is_averaged() -> None:
    """Python writes no integer of more than 4,300 digits."""
    for means in towers(averaged_in_large_numbers, 15_000):
        assert means == [0.5] * 15_000


def refused(strategy: mirrored.Strategy, kind: str) -> None:
    tower = strategy.topology.index
    with strategy.scope():
        model = nn.Linear(2, 2)
    x, y = torch.ones(1, 2, requires_grad=True), torch.ones(2, 2, requires_grad=True)

    def with_a_graph(_: Tensor) -> None:
        model.weight.grad = model.weight * 2 if tower else model.weight.detach()
        strategy.average_gradients(model.parameters())

    def under_no_sync(loss: Tensor) -> None:
        with strategy.no_sync():
            strategy.grad(loss, model.parameters())

    calls: dict[str, Callable[[Tensor], object]] = {
        "graph": lambda loss: strategy.grad(loss, model.parameters(), create_graph=True),
        "unused": lambda loss: strategy.grad(loss if tower else model.weight.sum(), list(model.parameters())),
        "graph in gradients": with_a_graph,
        "number": lambda loss: strategy.grad(loss, [model.weight, model.bias][: 1 + tower]),
        "shape": lambda loss: strategy.grad(loss + y.sum(), [model.weight, y if tower else x]),
        "no_sync": under_no_sync,
        "other call": lambda loss: strategy.grad(loss, model.parameters()) if tower else strategy.barrier(),
    }
    if kind == "barrier":
        strategy.reduce("sum", 1) if tower else strategy.barrier()
    strategy.run(lambda: calls[kind](model(x).sum()))


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("graph", ValueError, r"carries no graph.*add the penalty to the loss"),
        ("unused", ValueError, r"strategy.grad\(\) of 2 inputs on tower 0: .*Set allow_unused=True"),
        ("graph in gradients", ValueError, r"average_gradients\(\) of 2 parameters on tower 1: a gradient carries a"),
        ("number", mirrored.DisagreementError, r"tower 1 strategy.grad\(\) of 2 inputs, tower 0 strategy.grad.. of 1"),
        ("shape", mirrored.DisagreementError, r"of shape \(1, 2\) on tower 0, but torch.float32 of shape \(2, 2\) on"),
        ("no_sync", RuntimeError, r"in no_sync\(\) gradients are each tower's own"),
        ("other call", mirrored.DisagreementError, r"tower 1 strategy.grad\(\) of 2 inputs, tower 0 strategy.barrier"),
        ("barrier", mirrored.DisagreementError, r"tower 1 reduce\('sum', axis=None\), tower 0 strategy.barrier\(\)"),
    ],
)
def test_own_gradients_that_are_refused(kind: str, error: type[Exception], words: str) -> None:
    all_raise(error, words, refused, kind)


def gradient_of_a_share(strategy: mirrored.Strategy) -> None:
    [(x,)] = list(strategy.distribute_dataset(TensorDataset(torch.rand(5, 2)), 5))
    strategy.run(lambda x: strategy.grad(x.requires_grad_().square().sum(), x), args=(x,))


def test_gradients_of_examples_are_not_averaged() -> None:
    words = r"input 0, of shape \(\d, 2\), is this tower's share of a batch"
    all_raise(ValueError, words, gradient_of_a_share)


def meet(strategy: mirrored.Strategy, path: str) -> int:
    """The others read what the chief has written before it came to the barrier."""
    if strategy.is_chief:
        with open(path, "w", encoding="utf-8") as file:
            file.write("7")
    strategy.barrier()
    with open(path, encoding="utf-8") as file:
        return int(file.read())


def test_barrier(tmp_path: Any) -> None:
    assert towers(meet, str(tmp_path / "a"), count=3) == [7, 7, 7]
    assert meet(mirrored.OneDeviceStrategy(), str(tmp_path / "b")) == 7
