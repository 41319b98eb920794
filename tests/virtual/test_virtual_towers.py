"""The same bits on any number of towers: ``virtual_towers`` and ``strategy.backward``."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import random
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import exactness
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import mirrored
from mirrored.data.shares import Cut, bounds
from mirrored.virtual import buffers
from tests.support.jobs import assert_close, failures, make_data, make_mlp
from towers.gradients.tree_sum import Subtree

V = 8


def virtual(fn: Callable[..., Any], *args: Any, count: int, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
    """``fn(strategy, *args)`` on ``count`` towers, with 8 virtual ones."""
    return mirrored.launch(_with_strategy, (fn, args, kwargs), towers=count, timeout=timeout)


def _with_strategy(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return fn(mirrored.MirroredStrategy(**{"virtual_towers": V, "seed": 0, **kwargs}), *args)


def digest(values: Iterable[Tensor | float]) -> str:
    found = hashlib.sha256()
    for value in values:
        found.update(torch.as_tensor(value).detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def one_digest(fn: Callable[..., Any], *args: Any, counts: Iterable[int] = (1, 2), **kwargs: Any) -> str:
    """The digest that ``fn(strategy, *args)`` returns on every tower of every number of towers."""
    found = {count: virtual(fn, *args, count=count, **kwargs) for count in counts}
    assert len({one for results in found.values() for one in results}) == 1, found
    return next(iter(found.values()))[0]


# -- the whole of it ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "optimizer", "others"),
    [
        ("cnn", "adamw", [("shared_memory", (8,)), ("gloo", (4, 1, 2))]),
        ("lstm", "sgd", [("shared_memory", (4,))]),
        ("transformer", "adam", [("gloo", (2,))]),
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


# -- right, not only equal -----------------------------------------------------------------------------------


def global_mean(strategy: mirrored.Strategy, examples: int, weights: str) -> tuple[list[Tensor], Tensor]:
    """Gradient and loss of one step over all ``examples``."""
    with strategy.scope():
        model = make_mlp()
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
    data = strategy.distribute_dataset(TensorDataset(torch.arange(8.0).unsqueeze(1)), 8)

    def losses(x: Tensor) -> Tensor:
        out = layer(x)
        if int(x[0, 0]) in parts:
            out = out + rare(torch.tensor([[-0.0, 1.0]])).sum() * (x - x + 1)
        return out.squeeze(1)

    for (x,) in data:
        strategy.run(lambda x: strategy.backward(losses, x), args=(x,))
    return digest([p.grad for p in (layer.weight, rare.weight) if p.grad is not None]), rare.weight.grad


@pytest.mark.parametrize("parts", [[], [3], [0, 7], list(range(8))])
def test_parameters_that_some_virtual_towers_use(parts: list[int]) -> None:
    found = [one for count in (1, 4) for one in virtual(partly_used, parts, count=count)]
    assert len({one for one, _ in found}) == 1
    if parts:
        assert torch.equal(found[0][1], torch.tensor([[0.0, 1.0]] * 2) * len(parts) / 8)
    else:
        assert found[0][1] is None


# -- random numbers ------------------------------------------------------------------------------------------


def draws(strategy: mirrored.Strategy) -> tuple[list[Any], tuple[Any, ...], tuple[Any, ...]]:
    """What loss functions draw, by virtual tower, and what is drawn after them."""
    with strategy.scope():
        model = make_mlp()
    data = strategy.distribute_dataset(TensorDataset(*make_data(16)), 16)
    drawn: list[Any] = []

    def losses(x: Tensor, y: Tensor) -> Tensor:
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(()))))
        return model(x).sum(1)

    def after() -> tuple[Any, ...]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    before = None
    for _ in range(2):
        for batch in data:
            state = random.getstate(), np.random.get_state(), torch.get_rng_state()
            before = after()
            random.setstate(state[0])
            np.random.set_state(state[1])
            torch.set_rng_state(state[2])
            strategy.run(lambda x, y: strategy.backward(losses, x, y), args=batch)
    assert before is not None
    return drawn, before, after()


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
    with strategy.scope():
        model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    data = strategy.distribute_dataset(TensorDataset(*make_data(16, torch.float32)), 16)
    for batch in data:
        strategy.run(lambda x, y: strategy.backward(lambda x: model(x).sum(1), x), args=batch)
    return digest(p.grad for p in model.parameters())


def test_the_script_may_seed_instead_of_the_strategy() -> None:
    assert one_digest(without_seed, seed=None) != one_digest(without_seed, counts=(1,), seed=1)


# -- buffers -------------------------------------------------------------------------------------------------


def with_batch_norm(strategy: mirrored.Strategy, examples: int) -> dict[str, Tensor]:
    with strategy.scope():
        norm = nn.BatchNorm1d(5, momentum=0.25).double()
    data = strategy.distribute_dataset(TensorDataset(*make_data(examples)), examples)
    for batch in data:
        strategy.run(lambda x, y: strategy.backward(lambda x: norm(x).square().sum(1), x), args=batch)
    return {name: value.clone() for name, value in norm.named_buffers()}


@pytest.mark.parametrize("examples", [16, 23])
def test_running_statistics_are_the_mean_over_virtual_towers(examples: int) -> None:
    x, means, variances = make_data(examples)[0], [], []
    for part in range(V):
        start, end = bounds(examples, V, part)
        means.append(0.25 * x[start:end].mean(0))
        variances.append(0.75 + 0.25 * x[start:end].var(0))
    found = [one for count in (1, 4) for one in virtual(with_batch_norm, examples, count=count)]
    for one in found:
        assert_close([one["running_mean"], one["running_var"]], [sum(means) / V, sum(variances) / V], 1e-12)
        assert one["num_batches_tracked"] == 1
        assert all(torch.equal(one[name], found[0][name]) for name in one)


class Remembers(nn.Module):
    """Buffers of all sorts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("mask", torch.triu(torch.full((4, 4), float("-inf")), 1))
        self.register_buffer("third", torch.full((3,), 1 / 3))
        self.register_buffer("mean", torch.zeros(1))
        self.register_buffer("short", torch.zeros(2, dtype=torch.bfloat16))
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("table", torch.zeros(2**19))  # 2 MB
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("unseen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("positions", torch.arange(5))
        self.register_buffer("moved", torch.zeros(2))
        self.register_buffer("turned", torch.zeros(2, 3).t())
        self.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        self.mean = self.mean * 0.5 + x.mean()  # another tensor
        self.short += x.mean()
        self.phase += torch.complex(x.mean(), -x.mean())
        self.table[int(x[0]) :] += x.mean()
        self.steps += 1
        self.unseen.numpy()[...] += 1  # no new version of the tensor
        self.moved.data = self.moved + x.mean()  # the same tensor in other memory
        self.turned += x.mean()
        return self.weight * x.squeeze(1)


def with_buffers(strategy: mirrored.Strategy, examples: int) -> str:
    with strategy.scope():
        model = Remembers()
    kept = dict(model.named_buffers())
    data = strategy.distribute_dataset(TensorDataset(torch.arange(float(examples)).unsqueeze(1)), examples)
    for _ in range(2):
        for batch in data:
            strategy.run(lambda x: strategy.backward(model, x), args=batch)
    assert all(buffer is kept[name] for name, buffer in model.named_buffers()), "the registered tensors stay"
    assert model.steps == model.unseen == 2
    assert torch.equal(model.positions, torch.arange(5))
    assert torch.equal(model.mask, torch.triu(torch.full((4, 4), float("-inf")), 1))
    assert torch.equal(model.third, torch.full((3,), 1 / 3)), "what nobody changes keeps its bits"
    # 11 examples in 8 parts: 0 1 | 2 3 | 4 5 | 6 | … | 10; the mean of the parts' means, added up over two steps.
    parts = min(examples, V)
    cuts = [bounds(examples, V, part) for part in range(parts)]
    means = [sum(range(start, end)) / (end - start) for start, end in cuts]
    torch.testing.assert_close(model.mean.item(), 1.5 * sum(means) / parts)
    torch.testing.assert_close(model.phase[0].item(), complex(2, -2) * sum(means) / parts)
    for buffer in (model.moved, model.turned):
        torch.testing.assert_close(buffer, torch.full_like(buffer, 2 * sum(means) / parts))
    return digest(model.buffers())


@pytest.mark.parametrize("examples", [11, 5])
def test_buffers_of_all_sorts(examples: int) -> None:
    one_digest(with_buffers, examples, counts=(1, 4))


class CountsExamples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.weight * x.squeeze(1)


def counting(strategy: mirrored.Strategy) -> None:
    with strategy.scope():
        model = CountsExamples()
    for (x,) in strategy.distribute_dataset(TensorDataset(torch.ones(9, 1)), 9):
        strategy.run(lambda x: strategy.backward(model, x), args=(x,))


@pytest.mark.parametrize("count", [1, 4])
def test_integer_buffers_that_differ_are_named_on_all_towers(count: int) -> None:
    for error in failures_of(counting, count=count):
        assert isinstance(error, mirrored.MirrorError)
        assert "CountsExamples.seen" in str(error)


def counting_late(strategy: mirrored.Strategy, examples: int) -> list[int]:
    """The steps that were done of three, where buffers cannot be read at once, as those of GPUs."""
    buffers._can_be_read = lambda tensor: False
    with strategy.scope():
        model = CountsExamples()
    steps = []
    with pytest.raises(mirrored.MirrorError, match="CountsExamples.seen"):
        for step in range(3):
            for batch in strategy.distribute_dataset(TensorDataset(torch.ones(examples, 1)), examples):
                strategy.run(lambda x: strategy.backward(model, x), args=batch)
                steps.append(step)
    return steps


def test_integer_buffers_that_cannot_be_read_at_once_are_named_on_all_towers_later() -> None:
    # Of 14 examples in 8 parts the last two have one, so on two towers only the second has seen a difference.
    assert virtual(counting_late, 14, count=2) == [[0], [0]]
    assert virtual(counting_late, 9, count=4) == [[0]] * 4


def failures_of(fn: Callable[..., Any], *args: Any, count: int) -> list[BaseException]:
    return failures(_in_virtual, fn, args, count=count)


def _in_virtual(_: mirrored.Strategy, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    _with_strategy(fn, args, {})


# -- with what else scripts do ---------------------------------------------------------------------------------


def usual_step(strategy: mirrored.Strategy, kind: str) -> str:
    """Three steps of ragged batches with one of the usual extras."""
    with strategy.scope():
        model = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    called = torch.compile(model, dynamic=False) if kind == "compile" else model
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1, enabled=kind == "scaler")
    autocast: Any = torch.autocast("cpu", torch.bfloat16) if kind == "autocast" else contextlib.nullcontext()
    data = strategy.distribute_dataset(TensorDataset(*make_data(130, torch.float32)), 48, shuffle=True)
    losses = []

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        with autocast:
            loss = strategy.backward(lambda x, y: scaler.scale(F.cross_entropy(called(x), y, reduction="none")), x, y)
        if kind == "scaler":
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        return loss

    for batch in data:
        losses.append(strategy.run(step, args=batch))
    state = optimizer.state_dict()["state"]
    return digest([*model.parameters(), *model.buffers(), *losses, *(v for s in state.values() for v in s.values())])


@pytest.mark.parametrize("kind", ["plain", "scaler", "autocast"])
def test_the_usual_extras(kind: str) -> None:
    one_digest(usual_step, kind)


def test_compiled_model() -> None:
    one_digest(usual_step, "compile", counts=(1, 2), timeout=240)


def test_sharded_optimizer() -> None:
    plain = one_digest(usual_step, "plain", counts=(1,))
    assert one_digest(usual_step, "plain", counts=(2, 4), shard_optimizer=True) == plain


def two_models(strategy: mirrored.Strategy) -> str:
    """A generator and a discriminator, in one step."""
    with strategy.scope():
        generator, critic = nn.Linear(4, 5), nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (generator, critic)]

    def critic_loss(x: Tensor) -> Tensor:
        made = generator(torch.randn(len(x), 4)).detach()
        return F.softplus(critic(made) - critic(x)).squeeze(1)

    def generator_loss(x: Tensor) -> Tensor:
        return F.softplus(-critic(generator(torch.randn(len(x), 4)))).squeeze(1)

    def step(x: Tensor, _: Tensor) -> list[Tensor]:
        critic.zero_grad()
        losses = [strategy.backward(critic_loss, x)]
        optimizers[1].step()
        generator.zero_grad()
        losses.append(strategy.backward(generator_loss, x))
        optimizers[0].step()
        return losses

    data = strategy.distribute_dataset(TensorDataset(*make_data(40, torch.float32)), 16)
    losses = [loss for batch in data for loss in strategy.run(step, args=batch)]
    return digest([*generator.parameters(), *critic.parameters(), *losses])


def test_two_models_with_two_optimizers() -> None:
    one_digest(two_models)


def on_played_hosts(hosts: str) -> str:
    os.environ["NCCL_HOSTID"] = hosts[int(os.environ["RANK"])]
    strategy = mirrored.MirroredStrategy(virtual_towers=V, seed=0)
    assert "across 2 hosts" in strategy.communicator.backend
    return usual_step(strategy, "plain")


def test_several_hosts() -> None:
    found = set(mirrored.launch(on_played_hosts, ("aaab",), towers=4))
    assert found == {one_digest(usual_step, "plain", counts=(1,))}


def sparse_table(strategy: mirrored.Strategy, also_dense: bool) -> tuple[str, bool, Tensor]:
    with strategy.scope():
        table = nn.Embedding(20, 4, sparse=True)
        nn.init.uniform_(table.weight, generator=torch.Generator().manual_seed(3))
        kind = torch.optim.SGD if also_dense else torch.optim.SparseAdam
        optimizer = kind(table.parameters(), lr=0.1)

    def losses(words: Tensor) -> Tensor:
        found = table(words).square().sum((1, 2))
        return found + table.weight.sum() if also_dense and 4 in words else found

    def step(words: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = strategy.backward(losses, words)
        gradients.append(table.weight.grad)
        optimizer.step()
        return loss

    gradients: list[Tensor] = []
    words = torch.arange(60).view(20, 3) ** 2 % 17
    kept = [strategy.run(step, args=batch) for batch in strategy.distribute_dataset(TensorDataset(words), 11)]
    assert len(kept) == 2
    first = gradients[0]
    return digest([table.weight, *kept]), first.is_sparse, first.to_dense() if first.is_sparse else first


@pytest.mark.parametrize("also_dense", [False, True])
def test_sparse_gradients(also_dense: bool) -> None:
    found = [one for count in (1, 4) for one in virtual(sparse_table, also_dense, count=count)]
    assert len({one for one, _, _ in found}) == 1
    assert {is_sparse for _, is_sparse, _ in found} == {not also_dense}
    if not also_dense:
        table = torch.empty(20, 4).uniform_(generator=torch.Generator().manual_seed(3)).requires_grad_()
        words = (torch.arange(60).view(20, 3) ** 2 % 17)[:11]
        F.embedding(words, table).square().sum((1, 2)).mean().backward()
        assert_close([found[0][2]], [table.grad], 1e-6)


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(torch.arange(21.0).unsqueeze(1))


def streaming(strategy: mirrored.Strategy) -> str:
    with strategy.scope():
        model = nn.Linear(1, 1)
    losses = [
        strategy.run(lambda x: strategy.backward(lambda x: model(x).square().squeeze(1), x), args=(x,))
        for x in strategy.distribute_dataset(Stream(), 8)
    ]
    return digest([*losses, model.weight.grad])


def test_iterable_data() -> None:
    one_digest(streaming)


def nested(strategy: mirrored.Strategy) -> str:
    """A batch of a dict with texts."""
    with strategy.scope():
        model = nn.Linear(1, 3)
    examples = [{"x": torch.tensor([float(i)]), "name": f"example {i}"} for i in range(12)]
    factors = torch.tensor([1.0, 2.0, 3.0])

    def losses(batch: dict[str, Any]) -> Tensor:
        assert batch["name"] == [f"example {int(x)}" for x in batch["x"]]
        return (model(batch["x"]) * factors).sum(1)

    for batch in strategy.distribute_dataset(examples, 12):
        strategy.run(lambda batch: strategy.backward(losses, batch), args=(batch,))
    return digest([model.weight.grad])


def test_nested_batches() -> None:
    one_digest(nested)


def pad_and_mask(examples: list[Tensor]) -> dict[str, Any]:
    """Sequences padded to the longest, with some entries masked at random."""
    padded = nn.utils.rnn.pad_sequence(examples, batch_first=True)
    return {"x": padded * (torch.rand(padded.shape) > 0.2), "length": [f"{len(e)}" for e in examples]}


def pad_to_eight(examples: list[Tensor]) -> dict[str, Any]:
    batch = pad_and_mask(examples)
    return batch | {"x": F.pad(batch["x"], (0, 8 - batch["x"].shape[1]))}


class Sequences(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(sequences())


def sequences() -> list[Tensor]:
    return [torch.arange(1.0, 3 + 3 * i % 7) for i in range(28)]


def collating(strategy: mirrored.Strategy, collate: Callable[..., Any], stream: bool) -> tuple[str, list[Any]]:
    with strategy.scope():
        cell = nn.GRU(1, 4, batch_first=True)
    seen: list[Any] = []

    def losses(batch: dict[str, Any]) -> Tensor:
        x, lengths = batch["x"], batch["length"]
        assert len(x) == len(lengths)
        seen.append((tuple(x.shape), x.sum().item(), lengths))
        return cell(x.unsqueeze(2))[0].sum((1, 2))

    data: Any = Sequences() if stream else sequences()
    for batch in strategy.distribute_dataset(data, 11, collate_fn=collate):
        strategy.run(lambda batch: strategy.backward(losses, batch), args=(batch,))
    return digest(p.grad for p in cell.parameters()), seen


@pytest.mark.parametrize("stream", [False, True], ids=["map", "stream"])
@pytest.mark.parametrize("collate", [pad_and_mask, pad_to_eight])
def test_padding_and_masking_do_not_depend_on_the_number_of_towers(collate: Callable[..., Any], stream: bool) -> None:
    alone = virtual(collating, collate, stream, count=1)[0]
    if collate is pad_and_mask:
        assert len({shape[1] for shape, _, _ in alone[1]}) > 1, "parts are padded differently"
    assert {one for one, _ in virtual(collating, collate, stream, count=4)} == {alone[0]}


def labels_and_sequences(examples: list[Tensor]) -> tuple[Tensor, list[Tensor], int, Tensor]:
    """One label and one sequence for each example, how many there are, and the longest's length."""
    lengths = torch.tensor([float(len(e)) for e in examples])
    return lengths, list(examples), len(examples), lengths.max()


def with_lists(strategy: mirrored.Strategy) -> tuple[list[float], list[list[float]]]:
    with strategy.scope():
        model = nn.Linear(1, 1)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
    means, held = [], []

    def losses(batch: Any) -> Tensor:
        labels, sequences, count, longest = batch
        assert count == len(labels) == len(sequences)
        assert longest == labels.max()
        return torch.stack([model(s.unsqueeze(1)).sum() for s in sequences])

    for batch in strategy.distribute_dataset(sequences()[:24], 12, collate_fn=labels_and_sequences):
        assert len(batch[0]) == len(batch[1]) == batch[2]
        held.append([float(s.sum()) for s in batch[1]])
        means.append(float(strategy.run(lambda batch: strategy.backward(losses, batch), args=(batch,))))
    return means, held


def test_batches_of_lists_are_collated_part_by_part() -> None:
    sums = [float(s.sum()) for s in sequences()[:24]]
    for count in (1, 2):
        results = virtual(with_lists, count=count)
        for means, _ in results:
            assert means == pytest.approx([sum(sums[:12]) / 12, sum(sums[12:]) / 12])
        shares = [share for step in zip(*(held for _, held in results), strict=True) for share in step]
        assert [one for share in shares for one in share] == sums


def two_collated_batches(strategy: mirrored.Strategy) -> tuple[str, set[int]]:
    """Batches of two loops at once, with a loop over other data between loading and using them."""
    with strategy.scope():
        cell = nn.GRU(1, 4, batch_first=True)
    widths: set[int] = set()

    def losses(one: Tensor, other: Tensor) -> Tensor:
        widths.update((one.shape[1], other.shape[1] + 100))
        return cell(one.unsqueeze(2))[0].sum((1, 2)) + cell(other.unsqueeze(2))[0].sum((1, 2))

    first = strategy.distribute_dataset(sequences(), 12, collate_fn=pad_and_mask)
    second = strategy.distribute_dataset(sequences()[::-1], 12, collate_fn=pad_and_mask)
    held_out = strategy.distribute_dataset(sequences()[:5], 5, collate_fn=pad_and_mask)
    for one, other in zip(first, second, strict=True):
        for _ in held_out:
            pass
        strategy.run(lambda *both: strategy.backward(losses, *both), args=(one["x"], other["x"]))
    return digest(p.grad for p in cell.parameters()), widths


def test_batches_of_several_loops_keep_their_parts() -> None:
    alone = virtual(two_collated_batches, count=1)[0]
    assert len(alone[1]) > 4, "parts are padded differently in both"
    assert {one for one, _ in virtual(two_collated_batches, count=4)} == {alone[0]}


def padded_and_changed(strategy: mirrored.Strategy) -> None:
    for batch in strategy.distribute_dataset(sequences(), 11, collate_fn=pad_and_mask):
        strategy.run(lambda x: strategy.backward(lambda x: x.sum(1), x), args=(batch["x"] + 0,))


def test_what_was_made_of_a_collated_batch_is_refused() -> None:
    for error in failures_of(padded_and_changed, count=1):
        with pytest.raises(ValueError, match="not one of the batch's own"):
            raise error


def with_a_model_that_the_chief_keeps(strategy: mirrored.Strategy) -> str:
    """Folds: every one trains a new model, and the chief alone keeps the first."""
    kept, losses = [], []
    for fold in range(3):
        with strategy.scope():
            model = nn.Sequential(nn.Linear(5, 4 + 8 * fold), nn.BatchNorm1d(4 + 8 * fold), nn.Linear(4 + 8 * fold, 1))
        for batch in strategy.distribute_dataset(TensorDataset(make_data(16, torch.float32)[0]), 16):
            losses.append(strategy.run(lambda x, m=model: strategy.backward(lambda x: m(x).sum(1), x), args=batch))
        if strategy.is_chief and fold == 0:
            kept.append(model)
    return digest([*losses, *model.buffers()])


def test_a_model_that_one_tower_keeps_does_no_harm() -> None:
    one_digest(with_a_model_that_the_chief_keeps)


class Observes(nn.Module):
    """A range that begins with infinities, and a value that is set; used by chance."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("low", torch.tensor(float("inf")))
        self.register_buffer("scale", torch.tensor(1e8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("row", torch.zeros(1).expand(3))

    def forward(self, x: Tensor) -> Tensor:
        if float(x[0]) % 2:
            self.low = torch.minimum(self.low, x.min().detach())
            self.scale.fill_(0.125)
            self.calls.data += 1
        return self.weight * x.squeeze(1)


def observing(strategy: mirrored.Strategy, first: int) -> dict[str, float]:
    strategy_buffers = {}
    with strategy.scope():
        model = Observes()
    data = torch.arange(float(first), 8).unsqueeze(1)[:: 1 + first]
    for (x,) in strategy.distribute_dataset(TensorDataset(data), 8):
        strategy.run(lambda x: strategy.backward(model, x), args=(x,))
    for name, buffer in model.named_buffers():
        strategy_buffers[name] = float(buffer.sum())
    return strategy_buffers


def test_buffers_that_are_set_begin_infinite_or_are_used_by_chance() -> None:
    # All of 1, 3, 5, 7 write; the mean of the four is taken.
    for count in (1, 4):
        for found in virtual(observing, 1, count=count):
            assert found == {"low": 4.0, "scale": 0.125, "calls": 1.0, "row": 0.0}
    # Of 0 … 7 every other one: the rest keeps what was there.
    found = [one for count in (1, 4) for one in virtual(observing, 0, count=count)]
    assert all(one == found[0] for one in found)
    assert found[0]["calls"] == 1
    assert found[0]["scale"] == pytest.approx((1e8 + 0.125) / 2)


def mixed_with_no_sync(strategy: mirrored.Strategy) -> None:
    with strategy.scope():
        model = nn.Linear(5, 1)

    def step(x: Tensor) -> None:
        with strategy.no_sync():
            model(x).sum().backward()
        strategy.backward(lambda x: model(x).squeeze(1), x)

    for batch in strategy.distribute_dataset(TensorDataset(make_data(16, torch.float32)[0]), 16):
        strategy.run(step, args=batch)


def test_gradients_of_no_sync_are_not_mixed_in() -> None:
    for error in failures_of(mixed_with_no_sync, count=2):
        assert isinstance(error, mirrored.TowersError)
        assert "Linear.weight" in str(error) or "Linear.bias" in str(error)


def partly_without_a_graph(strategy: mirrored.Strategy) -> str:
    """Parts that have nothing to learn from; a sparse and then a dense gradient; views of a larger tensor."""
    with strategy.scope():
        table = nn.Embedding(20, 4, sparse=True)

    def step(words: Tensor, x: Tensor) -> None:
        strategy.backward(lambda w: table(w).sum((1, 2)) if 5 in w else w.sum(1) * 0.0, words)
        strategy.backward(lambda x: ((x - x.mean(0)) / x.std(0) @ table.weight).sum(1), x[:, :20])

    words, x = torch.arange(48).view(16, 3) % 20, torch.randn(16, 33, generator=torch.Generator().manual_seed(0))
    for batch in strategy.distribute_dataset(TensorDataset(words, x), 16):
        strategy.run(step, args=batch)
    return digest([table.weight.grad])


def test_parts_without_a_graph_and_views() -> None:
    one_digest(partly_without_a_graph, counts=(1, 4))


def test_a_model_that_was_dropped_is_let_go() -> None:
    strategy = mirrored.OneDeviceStrategy(virtual_towers=2, seed=0)
    x = make_data(8, torch.float32)[0]
    with strategy.scope():
        models = [nn.BatchNorm1d(5), nn.BatchNorm1d(5)]
    strategy.run(lambda: strategy.backward(lambda x: models[0](x).sum(1), x))
    gone = weakref.ref(models.pop(0))
    gc.collect()
    assert gone() is None
    strategy.run(lambda: strategy.backward(lambda x: models[0](x).sum(1), x))


def without_virtual_towers(strategy: mirrored.Strategy) -> tuple[list[Tensor], Tensor]:
    return global_mean(strategy, 11, "examples")


def test_without_virtual_towers_it_is_the_ordinary_backward() -> None:
    expected = virtual(global_mean, 11, "examples", count=1)[0]
    for count in (1, 3):
        for gradients, loss in virtual(without_virtual_towers, count=count, virtual_towers=None):
            assert_close([*gradients, loss], [*expected[0], expected[1]], 1e-12)


# -- mistakes ------------------------------------------------------------------------------------------------


def test_numbers_of_virtual_towers_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="power of two"):
        mirrored.OneDeviceStrategy(virtual_towers=6)
    with pytest.raises(ValueError, match="power of two"):
        mirrored.OneDeviceStrategy(virtual_towers=0)
    narrow = mirrored.CommunicationOptions(wire_dtype="bfloat16")
    with pytest.raises(ValueError, match="rounds gradients that are sent"):
        mirrored.MirroredStrategy(["cpu:0"], virtual_towers=4, communication=narrow)
    for error in failures_of(counting, count=3):
        assert isinstance(error, ValueError)
        assert "3 towers cannot share" in str(error)


def test_mistakes_are_named() -> None:
    strategy = mirrored.OneDeviceStrategy(virtual_towers=4, seed=0)
    with strategy.scope():
        model = make_mlp()
    x, y = make_data(8)

    def run(loss_fn: Callable[..., Any], *batch: Any, **kwargs: Any) -> Any:
        return strategy.run(lambda: strategy.backward(loss_fn, *batch, **kwargs))

    with pytest.raises(ValueError, match="one loss per example"):
        run(lambda x, y: F.cross_entropy(model(x), y), x, y)
    with pytest.raises(ValueError, match=r"losses of shape \(1,\)"):
        run(lambda x: model(x).sum().unsqueeze(0), x)
    with pytest.raises(ValueError, match="a float"):
        run(lambda x: 1.0, x)
    with pytest.raises(ValueError, match="no batch"):
        run(lambda: model(x).sum(1))
    with pytest.raises(ValueError, match="denominator"):
        run(lambda x: model(x).sum(1), x, denominator="weights")
    with pytest.raises(ValueError, match="shape of the losses"):
        run(lambda x: model(x), x, sample_weight=torch.ones(8), denominator="weights")
    with pytest.raises(ValueError, match="does not fit"):
        run(lambda x: model(x).sum(1), x, sample_weight=torch.ones(3))
    with pytest.raises(RuntimeError, match="no_sync"), strategy.no_sync():
        run(lambda x: model(x).sum(1), x)
    with pytest.raises(ValueError, match="sync_batch_norm"), strategy.scope(sync_batch_norm=True):
        pass
    with pytest.raises(ValueError, match="sync_batch_norm"):
        strategy.mirror(model, sync_batch_norm=True)
    with pytest.raises(ValueError, match="shape \\(4,\\), but this tower's share has 8 examples"):
        run(lambda x, factors: model(x).sum(1), x, torch.ones(4))
    with pytest.raises(ValueError, match="has 8 examples"):
        run(lambda x, words: model(x).sum(1), x, ["a", "b"])
    with pytest.raises(ValueError, match=r"shape \(1,\) does not fit 8"):
        run(lambda x: model(x).sum(1), x, sample_weight=torch.ones(1))
    with pytest.raises(RuntimeError, match="all parameters frozen"):
        run(lambda x: x.sum(1), x)
    with pytest.raises(RuntimeError, match=r"for the function that strategy\.run"):
        strategy.backward(lambda x: model(x).sum(1), x)
    with pytest.raises(mirrored.MirrorError, match="no scope mirrored"):
        outside = make_mlp()
        outside(x).sum().backward()
        strategy.run(torch.optim.SGD(outside.parameters(), lr=0.1).step)
    with strategy.scope():
        lazy = nn.LazyLinear(3)
    with pytest.raises(RuntimeError, match="LazyLinear gets its shape in its first forward"):
        strategy.run(lambda: lazy)
    with pytest.raises(ValueError, match="backwards is -1"):
        strategy.load_state_dict({"seed": 0, "backwards": -1})


def with_a_nan(strategy: mirrored.Strategy) -> tuple[str, list[str]]:
    """The second of three batches has one, in the last virtual tower; the script leaves that batch out."""
    with strategy.scope():
        model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, _ = make_data(48, torch.float32)
    x[31, 2] = torch.nan
    texts = []

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        try:
            strategy.backward(lambda x: model(x).squeeze(1), x)
        except mirrored.NonFiniteGradientError as error:
            texts.append(str(error))
        else:
            optimizer.step()

    for batch in strategy.distribute_dataset(TensorDataset(x), 16):
        strategy.run(step, args=batch)
    return digest([*model.parameters(), *model.buffers()]), texts


def test_a_nan_is_named_and_may_be_skipped() -> None:
    found = {count: virtual(with_a_nan, count=count, nonfinite_gradients="raise") for count in (1, 4)}
    for count, results in found.items():
        for sha, texts in results:
            assert sha == found[1][0][0], "the batch is left out as if it had not been"
            assert len(texts) == 1
            if count > 1:
                assert f"nan on tower {count - 1}" in texts[0]


def ordinary_backward(strategy: mirrored.Strategy) -> None:
    with strategy.scope():
        model = make_mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor, y: Tensor) -> None:
        mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none")).backward()
        optimizer.step()

    for batch in strategy.distribute_dataset(TensorDataset(*make_data(16)), 8):
        strategy.run(step, args=batch)


def test_the_ordinary_backward_is_said_not_to_be_exact(capfd: pytest.CaptureFixture[str]) -> None:
    virtual(ordinary_backward, count=2)
    assert capfd.readouterr().err.count("strategy.backward(loss_fn, *batch)") == 1


def test_a_failed_loss_function_leaves_everything_as_it_was() -> None:
    strategy = mirrored.OneDeviceStrategy(virtual_towers=4, seed=0)
    with strategy.scope():
        norm = nn.BatchNorm1d(5).double()
    x, _ = make_data(8)
    norm.weight.grad = before = torch.ones(5).double()
    state, calls = torch.get_rng_state(), []

    def losses(x: Tensor) -> Tensor:
        calls.append(torch.rand(()))
        if len(calls) == 3:
            raise KeyError("third")
        return norm(x).sum(1)

    with pytest.raises(KeyError, match="third"):
        strategy.run(lambda: strategy.backward(losses, x))
    assert norm.weight.grad is before
    assert torch.equal(before, torch.ones(5).double())
    assert torch.equal(norm.running_mean, torch.zeros(5).double())
    assert norm.num_batches_tracked == 0
    assert torch.equal(torch.get_rng_state(), state)


class Grows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(2**13))
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        self.cache = torch.zeros(2**14)
        return self.norm(x).sum(1)


def test_a_buffer_that_grows_is_refused_and_all_are_given_back() -> None:
    strategy = mirrored.OneDeviceStrategy(virtual_towers=2, seed=0)
    with strategy.scope():
        model = Grows()
    x, _ = make_data(8, torch.float32)
    with pytest.raises(mirrored.MirrorError, match="Grows.cache"):
        strategy.run(lambda: strategy.backward(model, x))
    assert model.cache.shape == (2**13,)
    assert torch.equal(model.norm.running_mean, torch.zeros(5))
    assert model.norm.num_batches_tracked == 0


class Misfits(nn.Module):
    """Makes something else of a counter, and then fails."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.dtype = dtype
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("positions", torch.arange(3))
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("big", torch.zeros(2**13))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1 if self.dtype is None else (self.count + 1).to(self.dtype)
        self.mean += 1
        self.big += 1
        raise KeyError("the script's own")


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_an_error_of_the_script_gives_all_buffers_back_and_comes_through(dtype: torch.dtype | None) -> None:
    strategy = mirrored.OneDeviceStrategy(virtual_towers=2, seed=0)
    with strategy.scope():
        model = Misfits(dtype)
    before = {name: value.clone() for name, value in model.named_buffers()}
    for _ in range(2):
        with pytest.raises(KeyError, match="the script's own"):
            strategy.run(lambda: strategy.backward(model, torch.ones(4, 1)))
        after = dict(model.named_buffers())
        assert all(
            after[name].dtype == value.dtype and torch.equal(after[name], value) for name, value in before.items()
        )


def test_batches_are_cut_by_virtual_towers() -> None:
    shares = [Cut(8, 0, 4).bounds(11), Cut(8, 4, 8).bounds(11)]
    assert shares == [(0, 7), (7, 11)], "not 6 and 5"
    for total in range(40):
        for towers in (1, 2, 4, 8):
            own = V // towers
            cuts = [Cut(V, own * i, own * (i + 1)) for i in range(towers)]
            parts = [
                (start + a, start + b)
                for cut in cuts
                for start, end in [cut.bounds(total)]
                for a, b in cut.parts_of(end - start)
            ]
            assert parts == [bounds(total, V, part) for part in range(V)]


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
