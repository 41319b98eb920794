"""Buffers with virtual towers: statistics, counts, and errors that give all of them back."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import mirrored
from mirrored.shares import bounds
from mirrored.virtual import buffers
from tests.support.jobs import all_raise, assert_close, make_data
from tests.support.sharded import assert_same_bits
from tests.support.virtual import CountsExamples, V, backward_each, counting, digest, one_digest, virtual


def with_batch_norm(strategy: mirrored.Strategy, examples: int) -> dict[str, Tensor]:
    norm = strategy.mirror(nn.BatchNorm1d(5, momentum=0.25).double())
    backward_each(strategy, lambda x, y: norm(x).square().sum(1), TensorDataset(*make_data(examples)), examples)
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
    model = strategy.mirror(Remembers())
    kept = dict(model.named_buffers())
    for _ in range(2):
        backward_each(strategy, model, TensorDataset(torch.arange(float(examples)).unsqueeze(1)), examples)
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


@pytest.mark.parametrize("count", [1, 4])
def test_integer_buffers_that_differ_are_named_on_all_towers(count: int) -> None:
    all_raise(mirrored.MirrorError, "CountsExamples.seen", counting, count=count, settings={"virtual_towers": V})


def counting_late(strategy: mirrored.Strategy, examples: int) -> list[int]:
    """The steps that were done of three, where buffers cannot be read at once, as those of GPUs."""
    buffers._can_be_read = lambda tensor: False
    model = strategy.mirror(CountsExamples())
    steps = []
    with pytest.raises(mirrored.MirrorError, match="CountsExamples.seen"):
        for step in range(3):
            backward_each(strategy, model, TensorDataset(torch.ones(examples, 1)), examples)
            steps.append(step)
    return steps


def test_integer_buffers_that_cannot_be_read_at_once_are_named_on_all_towers_later() -> None:
    # Of 14 examples in 8 parts the last two have one, so on two towers only the second has seen a difference.
    assert virtual(counting_late, 14, count=2) == [[0], [0]]
    assert virtual(counting_late, 9, count=4) == [[0]] * 4


class Adds(nn.Module):
    """Each forward adds a number to a buffer of three: as many as there are dtypes, from 1."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        for number, dtype in enumerate(dtypes, start=1):
            self.register_buffer(f"plus{number}", torch.zeros(3, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        for number, buffer in enumerate(self.buffers(), start=1):
            buffer += number
        return self.weight * x.squeeze(1)


def beside_a_model_of_one_tower(strategy: mirrored.Strategy) -> list[list[float]]:
    models = [strategy.mirror(Adds(torch.bfloat16)), strategy.mirror(Adds(torch.float32, torch.bfloat16))]
    data = TensorDataset(torch.ones(8, 1))
    backward_each(strategy, models[-1], data, 8)
    if not strategy.is_chief:
        models.pop(0)
        gc.collect()
    backward_each(strategy, models[-1], data, 8)
    return [buffer.tolist() for buffer in models[-1].buffers()]


def test_buffers_of_models_that_one_tower_alone_keeps_mix_up_no_others() -> None:
    assert virtual(beside_a_model_of_one_tower, count=2) == [[[2.0] * 3, [4.0] * 3]] * 2


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
    model = strategy.mirror(Observes())
    backward_each(strategy, model, TensorDataset(torch.arange(float(first), 8).unsqueeze(1)[:: 1 + first]), 8)
    return {name: float(buffer.sum()) for name, buffer in model.named_buffers()}


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


def test_a_failed_loss_function_leaves_everything_as_it_was() -> None:
    strategy = mirrored.OneDeviceStrategy(virtual_towers=4, seed=0)
    norm = strategy.mirror(nn.BatchNorm1d(5).double())
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
        assert_same_bits(dict(model.named_buffers()), before)
