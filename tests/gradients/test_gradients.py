"""Rule R2: after backward, grad is the mean over towers of what each contributed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mirrored
from tests.support.branches import use_one_branch_each
from tests.support.features import train_gan
from tests.support.jobs import make_data, make_mlp, parameters_of, towers
from tests.support.steps import averaging_step, equal_one_device, gradients_of, local_share


@pytest.mark.row(30)
def test_parameters_used_by_some_towers_count_zero_on_the_others() -> None:
    for left, right, idle in towers(use_one_branch_each):
        assert left == [1, 2]
        assert right == [1, 2]
        assert idle is None


def mix_models_and_towers(strategy: mirrored.Strategy) -> list[float | None]:
    """Two models; in the second backward tower 1 alone touches the second model."""
    with strategy.scope():
        first, second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    r = strategy.topology.index
    found: list[float | None] = []

    def backward(*models: nn.Module) -> None:
        for model in (first, second):
            model.zero_grad()
        sum(model(torch.full((1, 1), r + 1.0)).sum() for model in models).backward()
        found.extend(None if m.weight.grad is None else float(m.weight.grad) for m in (first, second))

    for _ in range(2):
        strategy.run(backward, args=(first,))
        strategy.run(backward, args=(first, second) if r else (first,))
        strategy.run(backward, args=(second,) if r else (first,))
    return found


def test_a_model_that_one_tower_alone_uses_is_exact() -> None:
    once = [1.5, None, 1.5, 1.0, 0.5, 1.0]
    assert towers(mix_models_and_towers) == [once * 2] * 2


def accumulate(strategy: mirrored.Strategy) -> dict[str, list[float]]:
    r = strategy.topology.index
    results = {}
    for name in ("two backwards", "no_sync", "no_sync in one run", "nothing new"):
        with strategy.scope():
            model, other = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)

        def backward(scale: float, model=model) -> None:
            (model.weight * scale * (r + 1)).sum().backward()

        if name == "two backwards":
            strategy.run(backward, args=(1.0,))
            strategy.run(backward, args=(10.0,))
        elif name == "no_sync":
            with strategy.no_sync():
                strategy.run(backward, args=(1.0,))
                strategy.run(backward, args=(2.0,))
            results["local"] = model.weight.grad.flatten().tolist()
            strategy.run(backward, args=(10.0,))
        elif name == "no_sync in one run":

            def step() -> None:
                with strategy.no_sync():
                    backward(1.0)
                backward(10.0)

            strategy.run(step)
        else:  # accumulated without sync, and the synced backward touches another model
            with strategy.no_sync():
                strategy.run(backward, args=(1.0,))
            strategy.run(lambda other=other: other.weight.sum().backward())
        results[name] = model.weight.grad.flatten().tolist()
    return results


def set_by_hand_after_no_sync(strategy: mirrored.Strategy) -> float:
    """A gradient of ``no_sync`` is dropped, another bucket is averaged, and then a gradient is set by hand."""
    model, other = strategy.mirror(nn.Linear(1, 1, bias=False)), strategy.mirror(nn.Linear(1, 1, bias=False))
    backward_of = lambda module: strategy.run(lambda: module.weight.sum().backward())  # noqa: E731
    for module in (model, other, other, other):
        backward_of(module)
    with strategy.no_sync():
        backward_of(model)
    model.weight.grad = None
    backward_of(other)
    model.weight.grad = torch.full((1, 1), float(strategy.topology.index))
    with strategy.no_sync():
        backward_of(other)
    backward_of(other)
    return float(model.weight.grad)


def test_a_gradient_set_by_hand_is_not_taken_for_one_of_no_sync() -> None:
    settings = {"communication": mirrored.CommunicationOptions(bucket_bytes=1)}
    assert towers(set_by_hand_after_no_sync, settings=settings) == [0.0, 1.0]


def test_accumulation() -> None:
    for r, result in enumerate(towers(accumulate)):
        assert result["two backwards"] == [16.5]  # 11 · mean(1, 2)
        assert result["local"] == [3.0 * (r + 1)]
        assert result["no_sync"] == [19.5]  # 13 · mean(1, 2)
        assert result["no_sync in one run"] == [16.5]
        assert result["nothing new"] == [1.5]


def test_two_models_with_two_optimizers() -> None:
    equal_one_device(train_gan)


class Tied(nn.Module):
    """An embedding whose matrix is also the output layer's."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 3, sparse=sparse)
        self.out = nn.Linear(3, 6, bias=False)
        if not sparse:
            self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embed(x))


def train_embedding(strategy: mirrored.Strategy, sparse: bool) -> dict[str, Tensor]:
    model = with_set_values(strategy.mirror(Tied(sparse)))
    step = averaging_step(model, torch.optim.SGD(model.parameters(), lr=0.5))
    [tokens] = local_share(strategy, torch.tensor([0, 1, 1, 4, 0]))
    for _ in range(3):
        strategy.run(step, args=(tokens, tokens))
        assert model.embed.weight.grad.is_sparse is sparse
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("sparse", [False, True], ids=["tied", "sparse"])
def test_embeddings(sparse: bool) -> None:
    state, _ = equal_one_device(train_embedding, sparse, tolerance=1e-6)
    assert sorted(state) == ["embed.weight", "out.weight"]


def with_set_values(model: nn.Module) -> Any:
    """The model, with values of its parameters that are the same wherever it is made."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel()).view_as(p))
    return model


def sparse_on_one_tower(strategy: mirrored.Strategy) -> tuple[list[float], list[float]]:
    with strategy.scope():
        table = nn.Embedding(4, 1, sparse=True)
        dense = nn.Linear(1, 1, bias=False)
    r = strategy.topology.index

    def backward() -> None:
        loss = dense(torch.ones(1, 1)).sum()
        if r:
            loss = loss + table(torch.tensor([1, 1, 3])).sum()
        loss.backward()

    strategy.run(backward)
    first = table.weight.grad.to_dense().flatten().tolist()
    table.zero_grad()
    mixed = table(torch.tensor([0])).sum() if r else (table.weight * 2).sum()
    strategy.run(mixed.backward)
    return first, table.weight.grad.to_dense().flatten().tolist()


@pytest.mark.row(40)
def test_sparse_gradients_of_one_tower_and_mixed_with_dense_ones() -> None:
    assert towers(sparse_on_one_tower) == [([0, 1, 0, 0.5], [1.5, 1, 1, 1])] * 2


def train_lazily(strategy: mirrored.Strategy) -> tuple[list[Tensor], float]:
    torch.manual_seed(strategy.topology.index)
    model = strategy.mirror(nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.LazyLinear(2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    r = strategy.topology.index

    def step() -> float:
        optimizer.zero_grad()
        model(torch.full((2, 3), r + 1.0)).sum().backward()
        optimizer.step()
        return float(model[2].bias.grad[0])

    gradients = [strategy.run(step) for _ in range(2)]
    return parameters_of(model), gradients[0]


def test_lazy_modules_are_mirrored_when_they_meet_their_first_batch() -> None:
    (first, gradient), (second, _) = towers(train_lazily)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert gradient == 2.0


def share_a_layer(strategy: mirrored.Strategy, reentrant: bool) -> list[list[Tensor]]:
    """Three backwards in which the gradient of the second layer comes twice."""
    model = with_set_values(strategy.mirror(nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]).double()))
    [own] = local_share(strategy, torch.linspace(-2, 2, 15, dtype=torch.float64).view(5, 3))

    def step() -> list[Tensor]:
        model.zero_grad()
        y = own.clone().requires_grad_()
        for layer in (model[1], model[0], model[1]):
            y = checkpoint(layer, y, use_reentrant=reentrant).tanh()
        mirrored.compute_average_loss(y.sum(1), global_batch_size=5).backward()
        return gradients_of(model)

    return [strategy.run(step) for _ in range(3)]


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_with_a_shared_layer(reentrant: bool) -> None:
    equal_one_device(share_a_layer, reentrant)


def look_at_a_complex_parameter(strategy: mirrored.Strategy) -> tuple[list[complex], list[int]]:
    with strategy.scope():
        model = nn.Module()
        model.weight = nn.Parameter(torch.tensor([1 + 1j, 2 - 1j]) * (strategy.topology.index + 1))
        model.steps = nn.Parameter(torch.tensor([strategy.topology.index]), requires_grad=False)
    r = strategy.topology.index
    strategy.run(lambda: (model.weight * (r + 1)).real.sum().backward())
    return [*model.weight.detach().tolist(), *model.weight.grad.tolist()], model.steps.tolist()


@pytest.mark.row(41)
def test_complex_and_integer_parameters() -> None:
    for numbers, steps in towers(look_at_a_complex_parameter):
        assert numbers == [1 + 1j, 2 - 1j, 1.5, 1.5]
        assert steps == [0]


def attached_at_one_tower() -> tuple[int, int]:
    strategy = mirrored.MirroredStrategy(["cpu:0"])
    model = strategy.mirror(make_mlp())
    strategy.run(lambda: model(make_data(4)[0]).sum().backward())
    hooks = sum(len(p._post_accumulate_grad_hooks or {}) for p in model.parameters())
    return hooks, len(model._forward_pre_hooks)


def test_nothing_is_attached_at_one_tower() -> None:
    assert attached_at_one_tower() == (0, 0)
