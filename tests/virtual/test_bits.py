"""The same bits on any number of towers: ``virtual_towers`` and ``strategy.backward``."""

from __future__ import annotations

import random
from typing import Any

import exactness
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import mirrored
from mirrored import generators
from tests.support.jobs import all_raise, assert_close, make_data, make_mlp
from tests.support.virtual import V, backward_each, digest, one_digest, virtual
from towers.gradients.reductions import Subtree


@pytest.mark.parametrize(
    ("model", "optimizer", "others"),
    [
        pytest.param("cnn", "adamw", [("shared_memory", (8,)), ("gloo", (4, 1, 2))], marks=pytest.mark.extended),
        ("lstm", "sgd", [("shared_memory", (4,))]),
        pytest.param("transformer", "adam", [("gloo", (2,))], marks=pytest.mark.extended),
    ],
)
def test_training_is_the_same_to_the_bit(model: str, optimizer: str, others: list[Any]) -> None:
    # 30 steps: the 29th batch of an epoch of 1,797 digits has 5 examples. scripts/exactness does all of them.
    stops = {1: (30,), 2: (11, 30), 3: (11, 20, 30)}
    expected = exactness.digest(model, optimizer, "shared_memory", (1,), stops[1])
    for implementation, counts in others:
        assert exactness.digest(model, optimizer, implementation, counts, stops[len(counts)]) == expected


def test_the_digest_sees_one_step_more() -> None:
    assert exactness.digest("lstm", "sgd", "gloo", (1,), (2,)) != exactness.digest("lstm", "sgd", "gloo", (1,), (3,))


def global_mean(strategy: mirrored.Strategy, examples: int, weights: str) -> tuple[list[Tensor], Tensor]:
    """Gradient and loss of one step over all ``examples``."""
    model = strategy.mirror(make_mlp())
    data = strategy.distribute_dataset(TensorDataset(*make_data(examples), torch.arange(examples) % 3 + 0.5), examples)

    def step(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        weighted: Any = {} if weights == "none" else {"sample_weight": w, "denominator": weights}
        return strategy.backward(lambda x, y: F.cross_entropy(model(x), y, reduction="none"), x, y, **weighted)

    (batch,) = data
    loss = strategy.run(step, args=batch)
    return [p.grad for p in model.parameters()], loss


@pytest.mark.parametrize("weights", ["none", "examples", "weights"])
@pytest.mark.parametrize("examples", [64, 11, 5])
def test_the_gradient_is_that_of_the_global_mean(examples: int, weights: str) -> None:
    model, (x, y) = make_mlp(), make_data(examples)
    w = torch.arange(examples, dtype=torch.float64) % 3 + 0.5 if weights != "none" else torch.ones(examples).double()
    losses = F.cross_entropy(model(x), y, reduction="none") * w
    loss = losses.sum() / (w.sum() if weights == "weights" else examples)
    loss.backward()
    for count in (1, 4) if weights == "none" else (2,):
        for gradients, mean in virtual(global_mean, examples, weights, count=count):
            assert_close([*gradients, mean], [*(p.grad for p in model.parameters()), loss.detach()], 1e-12)


def accumulated(strategy: mirrored.Strategy) -> tuple[str, list[Tensor]]:
    """Two backwards before a step, and a parameter that was there before its gradient was."""
    with strategy.scope():
        model = make_mlp()
        unused = nn.Linear(2, 2)
    data = strategy.distribute_dataset(TensorDataset(*make_data(16)), 16)
    held = []

    def step(x: Tensor, y: Tensor) -> None:
        strategy.backward(lambda x, y: F.cross_entropy(model(x), y, reduction="none"), x, y)
        held.append(model[0].weight.grad)
        strategy.backward(lambda x, y: model(x).square().sum(1), x, y)
        held.append(model[0].weight.grad)

    for batch in data:
        strategy.run(step, args=batch)
    assert held[0] is held[1], "as autograd does, a second backward adds to the gradient that is there"
    assert unused.weight.grad is None
    gradients = [p.grad for p in model.parameters()]
    return digest(gradients), gradients


def test_a_second_backward_adds() -> None:
    model, (x, y) = make_mlp(), make_data(16)
    (F.cross_entropy(model(x), y) + model(x).square().sum(1).mean()).backward()
    found = [virtual(accumulated, count=count)[0] for count in (1, 4)]
    assert len({one for one, _ in found}) == 1
    assert_close(found[0][1], [p.grad for p in model.parameters()], 1e-12)


def partly_used(strategy: mirrored.Strategy, parts: list[int]) -> tuple[str, Tensor | None]:
    """A layer that only the virtual towers with certain examples use, with negative zeros in its gradient."""
    with strategy.scope():
        layer, rare = nn.Linear(1, 1, bias=False), nn.Linear(2, 2, bias=False)
        nn.init.constant_(layer.weight, 1.0)
        nn.init.constant_(rare.weight, 1.0)

    def losses(x: Tensor) -> Tensor:
        out = layer(x)
        if int(x[0, 0]) in parts:
            out = out + rare(torch.tensor([[-0.0, 1.0]])).sum() * (x - x + 1)
        return out.squeeze(1)

    backward_each(strategy, losses, TensorDataset(torch.arange(8.0).unsqueeze(1)), 8)
    return digest([p.grad for p in (layer.weight, rare.weight) if p.grad is not None]), rare.weight.grad


@pytest.mark.parametrize("parts", [[], [3], [0, 7], list(range(8))])
def test_parameters_that_some_virtual_towers_use(parts: list[int]) -> None:
    found = [one for count in (1, 4) for one in virtual(partly_used, parts, count=count)]
    assert len({one for one, _ in found}) == 1
    if parts:
        assert torch.equal(found[0][1], torch.tensor([[0.0, 1.0]] * 2) * len(parts) / 8)
    else:
        assert found[0][1] is None


def draw() -> tuple[float, ...]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def draws(strategy: mirrored.Strategy) -> tuple[list[Any], tuple[Any, ...], tuple[Any, ...]]:
    """What loss functions draw, by virtual tower, and what is drawn after them."""
    model = strategy.mirror(make_mlp())
    data = strategy.distribute_dataset(TensorDataset(*make_data(16)), 16)
    drawn: list[Any] = []

    def losses(x: Tensor, y: Tensor) -> Tensor:
        drawn.append(draw())
        return model(x).sum(1)

    before = None
    for _ in range(2):
        for batch in data:
            place = generators.take(torch.device("cpu"))
            before = draw()
            generators.put(place, torch.device("cpu"))
            strategy.run(lambda x, y: strategy.backward(losses, x, y), args=batch)
    return drawn, before, draw()


def test_random_numbers_depend_on_seed_step_and_virtual_tower_only() -> None:
    alone = virtual(draws, count=1)[0]
    assert len({number for triple in alone[0] for number in triple}) == 2 * V * 3, "all different"
    for count in (2, 4):
        found = virtual(draws, count=count)
        own = V // count
        joined = [one for step in (0, 1) for drawn, _, _ in found for one in drawn[step * own : (step + 1) * own]]
        assert joined == alone[0]
        for _, before, now in found:
            assert now == before, "the generators go on as if nothing had happened"
            assert now == alone[2], "outside of virtual towers every tower draws alike"


def without_seed(strategy: mirrored.Strategy) -> str:
    torch.manual_seed(strategy.num_replicas_in_sync and 5)
    model = strategy.mirror(nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)))
    backward_each(strategy, lambda x, y: model(x).sum(1), TensorDataset(*make_data(16, torch.float32)), 16)
    return digest(p.grad for p in model.parameters())


def test_the_script_may_seed_instead_of_the_strategy() -> None:
    assert one_digest(without_seed, seed=None) != one_digest(without_seed, counts=(1,), seed=1)


def mixed_with_no_sync(strategy: mirrored.Strategy) -> None:
    model = strategy.mirror(nn.Linear(5, 1))

    def step(x: Tensor) -> None:
        with strategy.no_sync():
            model(x).sum().backward()
        strategy.backward(lambda x: model(x).squeeze(1), x)

    for batch in strategy.distribute_dataset(TensorDataset(make_data(16, torch.float32)[0]), 16):
        strategy.run(step, args=batch)


def test_gradients_of_no_sync_are_not_mixed_in() -> None:
    all_raise(mirrored.TowersError, "Linear.(weight|bias)", mixed_with_no_sync, settings={"virtual_towers": V})


def partly_without_a_graph(strategy: mirrored.Strategy) -> str:
    """Parts that have nothing to learn from; a sparse and then a dense gradient; views of a larger tensor."""
    table = strategy.mirror(nn.Embedding(20, 4, sparse=True))

    def step(words: Tensor, x: Tensor) -> None:
        strategy.backward(lambda w: table(w).sum((1, 2)) if 5 in w else w.sum(1) * 0.0, words)
        strategy.backward(lambda x: ((x - x.mean(0)) / x.std(0) @ table.weight).sum(1), x[:, :20])

    words, x = torch.arange(48).view(16, 3) % 20, torch.randn(16, 33, generator=torch.Generator().manual_seed(0))
    for batch in strategy.distribute_dataset(TensorDataset(words, x), 16):
        strategy.run(step, args=batch)
    return digest([table.weight.grad])


def test_parts_without_a_graph_and_views() -> None:
    one_digest(partly_without_a_graph, counts=(1, 4))


def test_without_virtual_towers_it_is_the_ordinary_backward() -> None:
    expected = virtual(global_mean, 11, "examples", count=1)[0]
    for count in (1, 3):
        for gradients, loss in virtual(global_mean, 11, "examples", count=count, virtual_towers=None):
            assert_close([*gradients, loss], [*expected[0], expected[1]], 1e-12)


def test_a_subtree_adds_as_a_balanced_tree_in_little_memory() -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(50) for _ in range(16)]
    subtree, level = Subtree(), leaves
    largest = 0
    for leaf in leaves:
        subtree.add([leaf.clone(), None])
        largest = max(largest, len(subtree._nodes))
    while len(level) > 1:
        level = [a + b for a, b in zip(level[::2], level[1::2], strict=True)]
    total, nothing = subtree.total()
    assert torch.equal(total, level[0])
    assert nothing is None
    assert largest == 4
    assert not torch.equal(total, sum(leaves[1:], leaves[0])), "the order matters for these numbers"
    subtree.add([torch.zeros(50), None])
    with pytest.raises(ValueError, match="power of two"):
        subtree.total()
