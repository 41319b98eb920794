"""Models, gradients and data that cannot be right: each ends on all towers, with one text, quickly."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import mirrored
from tests.support.jobs import assert_close, failures, make_data, make_mlp, parameters_of, towers
from tests.support.waiting import at_most


@pytest.fixture(autouse=True)
def quickly() -> Iterator[None]:
    """No bad input may hang."""
    with at_most(20):
        yield


class Records(logging.Handler):
    """Keeps the messages of the log."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def train_nothing(strategy: mirrored.Strategy, frozen: bool) -> tuple[list[float], str, list[str]]:
    records = Records()
    logging.getLogger("mirrored").addHandler(records)
    with strategy.scope():
        model: nn.Module = make_mlp().requires_grad_(False) if frozen else nn.ReLU()
    x, _ = make_data(4)
    evaluated = strategy.run(lambda: model(x).sum())
    with pytest.raises(RuntimeError) as error:
        strategy.run(lambda: model(x).sum().backward())
    if frozen:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            strategy.run(optimizer.step)
    said = [message for message in records.messages if "trains nothing" in message]
    return [float(evaluated)], str(error.value), said


@pytest.mark.parametrize("frozen", [False, True], ids=["no parameters", "all frozen"])
@pytest.mark.row(24)
def test_nothing_to_train(frozen: bool) -> None:
    (first, error, said), second = towers(train_nothing, frozen)
    assert (first, error, said) == second
    assert "does not require grad" in error
    assert said == (["SGD.step() trains nothing: all of its 4 parameters are frozen (requires_grad is False)"] * frozen)


def differing_models(strategy: mirrored.Strategy, kind: str) -> None:
    other = strategy.topology.index == 1
    with strategy.scope():
        if kind == "count":
            model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(2 + other)])
        elif kind == "shape":
            model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3 + other))
        elif kind == "dtype":
            model = nn.Linear(2, 2).to(torch.float64 if other else torch.float32)
        elif kind == "buffer":
            model = nn.BatchNorm1d(2, track_running_stats=not other)
        elif kind == "frozen":
            model = nn.Linear(2, 2).requires_grad_(not other)
        else:
            model = nn.Module()
            for name in ("a", "b") if other else ("b", "a"):
                setattr(model, name, nn.Parameter(torch.ones(1)))
    strategy.run(lambda: model)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("count", r"parameter Sequential.2.weight is on tower 1 but not on tower 0|Sequential.2.weight is missing"),
        ("shape", r"parameter Sequential.1.weight has shape \(3, 2\) on tower 0, but \(4, 2\) on tower 1"),
        ("buffer", "buffer BatchNorm1d.running_mean is missing on tower 1"),
        ("dtype", "parameter Linear.weight has dtype torch.float32 on tower 0, but torch.float64 on tower 1"),
        ("order", "the order of parameters differs: Module.b on tower 0 is Module.a on tower 1"),
        ("frozen", "parameter Linear.weight is trainable on tower 0, but not on tower 1"),
    ],
    ids=["count", "shape", "buffer", "dtype", "order", "trainable"],
)
@pytest.mark.row(25, 26, 27)
def test_models_that_differ(kind: str, words: str) -> None:
    first, second = failures(differing_models, kind)
    assert str(first) == str(second)
    for error in (first, second):
        with pytest.raises(mirrored.MirrorError, match=words):
            raise error


def disagree(strategy: mirrored.Strategy, call: str, row: int) -> list[str]:
    """Values that a backend would mix up (28: equally many bytes) or abort on (29), small and large."""
    said = []
    for length in (2, 1000):
        other = strategy.topology.index == 1
        value = torch.ones(length)
        if row == 28 and other:
            value = value.to(torch.int32)
        if row == 29 and other:
            value = torch.ones(length, 2) if "gather" in call else torch.ones(length + 1)
        owner = mirrored.get_replica_context if call.startswith("all") else lambda: strategy

        def step(value: Tensor = value, owner: Callable[[], Any] = owner) -> None:
            if "gather" in call:
                getattr(owner(), call)(value, axis=0)
            else:
                getattr(owner(), call)("sum", value)

        with pytest.raises(mirrored.DisagreementError) as error:
            strategy.run(step) if call.startswith("all") else step()
        said.append(str(error.value))
    assert strategy.reduce("sum", 1) == 2, "the towers are in step after it"
    return said


@pytest.mark.row(28, 29)
@pytest.mark.parametrize("row", [28, 29], ids=["equal bytes of another dtype", "sizes"])
@pytest.mark.parametrize("call", ["reduce", "gather", "all_reduce", "all_gather"])
def test_values_that_differ(call: str, row: int) -> None:
    first, second = towers(disagree, call, row)
    assert first == second
    for text, length in zip(first, (2, 1000), strict=True):
        there = "torch.int32" if row == 28 else rf"shape \({length}, 2\)" if "gather" in call else rf"\({length + 1},\)"
        assert re.search(rf"{there}.* on tower 1, but torch.float32 of shape \({length},\) on tower 0", text), text


def unused_on_one_tower(strategy: mirrored.Strategy) -> list[Tensor]:
    with strategy.scope():
        model = make_mlp()
        extra = nn.Linear(5, 3).double()
    nn.init.ones_(extra.weight)
    nn.init.zeros_(extra.bias)
    optimizer = torch.optim.SGD([*model.parameters(), *extra.parameters()], lr=0.1)
    x, y = make_data(8)
    alone = strategy.num_replicas_in_sync == 1
    own = slice(0, 8) if alone else slice(0, 4) if strategy.topology.index == 0 else slice(4, 8)

    def step() -> None:
        optimizer.zero_grad()
        logits = model(x[own])
        if alone:
            logits = logits + torch.cat([extra(x[:4]), torch.zeros(4, 3)])
        elif strategy.topology.index == 0:
            logits = logits + extra(x[own])
        loss = F.cross_entropy(logits, y[own], reduction="none")
        mirrored.compute_average_loss(loss, global_batch_size=8).backward()
        optimizer.step()

    for _ in range(3):
        strategy.run(step)
    return [*parameters_of(model), *parameters_of(extra)]


@pytest.mark.row(30)
def test_parameter_unused_on_one_tower() -> None:
    expected = unused_on_one_tower(mirrored.OneDeviceStrategy())
    for result in towers(unused_on_one_tower):
        assert_close(result, expected, 1e-12)


def frozen_in_mid_training(strategy: mirrored.Strategy) -> list[Tensor]:
    with strategy.scope():
        model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = make_data(8)
    own = slice(0, 8)
    if strategy.num_replicas_in_sync > 1:
        own = slice(0, 4) if strategy.topology.index == 0 else slice(4, 8)

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x[own]), y[own]).backward()
        optimizer.step()

    for i in range(4):
        if i == 2:
            model[0].requires_grad_(False)
        strategy.run(step)
    return parameters_of(model)


@pytest.mark.row(31)
def test_parameter_frozen_in_mid_training() -> None:
    expected = frozen_in_mid_training(mirrored.OneDeviceStrategy())
    for result in towers(frozen_in_mid_training):
        assert_close(result, expected, 1e-12)


def add_a_parameter(strategy: mirrored.Strategy, when: str) -> None:
    with strategy.scope():
        model = nn.Linear(2, 2)
        if when == "never run":
            torch.optim.SGD(model.parameters(), 0.1).step()
    if when == "after the first step":
        strategy.run(lambda: model(torch.ones(1, 2)).sum().backward())
    model.scale = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step() -> None:
        (model(torch.ones(1, 2)) * model.scale).sum().backward()
        optimizer.step()

    strategy.run(step)


@pytest.mark.parametrize("when", ["before the first step", "after the first step"])
@pytest.mark.row(32)
def test_parameter_added_after_the_scope(when: str) -> None:
    for tower, error in enumerate(failures(add_a_parameter, when)):
        words = (
            rf"step\(\) on tower {tower} would change Linear.scale, which no scope mirrored.*strategy.mirror\(module\)"
        )
        with pytest.raises(mirrored.MirrorError, match=words):
            raise error


def test_a_step_before_any_run_is_refused() -> None:
    for error in failures(add_a_parameter, "never run"):
        with pytest.raises(mirrored.MirrorError, match=r"never used in strategy.run\(...\)"):
            raise error


def leave_others_alone(strategy: mirrored.Strategy) -> float:
    """A model that is none of ours may be trained outside run, different on each tower."""
    with strategy.scope():
        model = nn.Linear(1, 1)
    strategy.run(lambda: model(torch.ones(1, 1)).sum().backward())
    helper = nn.Linear(1, 1, bias=False)
    nn.init.constant_(helper.weight, strategy.topology.index)
    optimizer = torch.optim.SGD(helper.parameters(), 1.0)
    helper(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    return float(helper.weight)


def test_models_that_are_not_ours_are_left_alone() -> None:
    assert towers(leave_others_alone) == [-1, 0]


def load_tied_weights(strategy: mirrored.Strategy) -> tuple[bool, list[str], bool]:
    with strategy.scope():
        model = nn.ModuleDict({"embed": nn.Embedding(3, 2), "out": nn.Linear(2, 3, bias=False)})
        model["out"].weight = model["embed"].weight
    strategy.run(lambda: model["out"](model["embed"](torch.tensor([1]))).sum().backward())
    state = {name: torch.full((3, 2), 7.0) for name in model.state_dict()}
    model.load_state_dict(state)
    tied = model["out"].weight is model["embed"].weight
    return tied, sorted(model.state_dict()), bool((model["embed"].weight == 7).all())


@pytest.mark.row(33)
def test_tied_weights_stay_tied_on_load() -> None:
    assert towers(load_tied_weights) == [(True, ["embed.weight", "out.weight"], True)] * 2


def loss_with_a_shape(strategy: mirrored.Strategy) -> None:
    with strategy.scope():
        model = nn.Linear(1, 1)
    strategy.run(lambda: model(torch.ones(3, 1)).backward())


@pytest.mark.row(34)
def test_loss_is_no_scalar() -> None:
    for error in failures(loss_with_a_shape):
        with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
            raise error


def uneven_mean(strategy: mirrored.Strategy, exact: bool) -> float:
    """d/dw of the mean of w·x over [-20, -4, -2, 0] cut 3 to 1: -6.5, but the mean of means is -4.33."""
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False).double()
    data = TensorDataset(torch.tensor([[-20.0], [-4.0], [-2.0]], dtype=torch.float64))
    [(x,)] = list(strategy.distribute_dataset(data, 3))

    def step(x: Tensor) -> None:
        values = model(x)[:, 0]
        loss = mirrored.compute_average_loss(values) if exact else values.mean()
        loss.backward()

    strategy.run(step, args=(x,))
    return float(model.weight.grad)


@pytest.mark.row(35)
def test_uneven_shares() -> None:
    # Shares are (-20, -4) and (-2): the true mean is -26/3, a mean of means -7.
    assert towers(uneven_mean, True) == pytest.approx([-26 / 3] * 2, rel=1e-15)
    assert towers(uneven_mean, False) == [-7.0, -7.0]


def one_example_on_three_towers(strategy: mirrored.Strategy) -> tuple[float, float, list[int]]:
    with strategy.scope():
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
    [(x,)] = list(strategy.distribute_dataset(TensorDataset(torch.tensor([[4.0]])), 8))

    def step(x: Tensor) -> Tensor:
        loss = mirrored.compute_average_loss(model(x)[:, 0])
        loss.backward()
        return loss.detach()

    loss = strategy.reduce("sum", strategy.run(step, args=(x,)))
    return float(loss), float(model.weight.grad), list(x.shape)


@pytest.mark.row(36)
def test_empty_share() -> None:
    assert towers(one_example_on_three_towers, count=3) == [(4, 4, [1, 1]), (4, 4, [0, 1]), (4, 4, [0, 1])]


def small_batches(strategy: mirrored.Strategy) -> tuple[list[list[int]], list[str]]:
    records = Records()
    logging.getLogger("mirrored").addHandler(records)
    data = strategy.distribute_dataset(range(5), 2)
    seen = [x.tolist() for x in data] + [x.tolist() for x in data]
    return seen, [message for message in records.messages if "smaller" in message]


@pytest.mark.row(37)
def test_global_batch_smaller_than_the_tower_count() -> None:
    results = towers(small_batches, count=3)
    assert results[0][0] == [[0], [2], [4]] * 2
    assert results[1][0] == [[1], [3], []] * 2
    assert results[2][0] == [[], [], []] * 2
    said = [messages for _, messages in results]
    assert said[1:] == [[], []]
    [text] = said[0]
    assert text.startswith("the global batch of 2 is smaller than the 3 towers: 1 of them have nothing to do in each")


class Stream(IterableDataset[int]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.length))


def different_lengths(strategy: mirrored.Strategy, kind: str) -> list[list[int]]:
    r = strategy.topology.index
    if kind == "map":
        data = strategy.distribute_dataset(range(10 + 4 * r), 4)
    elif kind == "stream":
        data = strategy.distribute_dataset(Stream(8 + 4 * r), 4)
    elif kind == "empty pipeline":
        data = strategy.distribute_datasets_from_function(lambda _: [torch.ones(1)] * r)
    else:
        data = strategy.distribute_datasets_from_function(
            lambda context: [torch.tensor([10 * context.input_pipeline_id + i]) for i in range(1 + 2 * r)]
        )
    return [x.tolist() for x in data]


@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        ("map", mirrored.DisagreementError, "different data, settings .*'examples': 14.* on tower 1, .*10"),
        ("stream", mirrored.DisagreementError, "the stream has ended after 2 batches on tower 0"),
        ("empty pipeline", ValueError, "the pipeline of tower 0 has no batch at all"),
    ],
)
@pytest.mark.row(38)
def test_different_numbers_of_steps_are_refused(kind: str, error: type[Exception], words: str) -> None:
    first, second = failures(different_lengths, kind)
    assert str(first) == str(second)
    with pytest.raises(error, match=words):
        raise first


@pytest.mark.row(38)
def test_pipelines_of_different_lengths_are_agreed_on() -> None:
    assert towers(different_lengths, "pipeline") == [[[0], [], []], [[10], [11], [12]]]


def test_data_that_cannot_be_distributed() -> None:
    strategy = mirrored.OneDeviceStrategy()
    for arguments, options, error, words in (
        ((range(3),), {}, ValueError, "global_batch_size is missing"),
        ((range(3), 0), {}, ValueError, "global_batch_size is 0, but must be a whole number from 1"),
        ((iter([1]), 2), {}, TypeError, "no __getitem__ and __len__.*distribute_datasets_from_function"),
        ((Stream(3), 2), {"shuffle": True}, ValueError, "an order of its own: shuffle inside it"),
        ((DataLoader(range(4), 2), 4), {}, ValueError, "batch_size, which is the global one, is 2"),
        ((DataLoader(range(4), 2),), {"shuffle": True}, ValueError, "belong to the DataLoader"),
        (
            (DataLoader(range(4), 2, sampler=DistributedSampler(range(4), 2, 0)),),
            {},
            ValueError,
            "has a DistributedSampler, so its data would be shared out twice",
        ),
    ):
        with pytest.raises(error, match=words):
            strategy.distribute_dataset(*arguments, **options)
    with pytest.raises(ValueError, match="state of a distributed dataset: step is -1"):
        strategy.distribute_dataset(range(3), 2).load_state_dict({"seed": 0, "epoch": 0, "step": -1})


def disagree_on_buckets(after: str) -> None:
    if after == "another strategy":
        mirrored.MirroredStrategy()
    else:
        dist.init_process_group("gloo")
    mine = 2000 if int(os.environ["RANK"]) else 1500
    mirrored.MirroredStrategy(communication=mirrored.CommunicationOptions(bucket_bytes=mine))


@pytest.mark.parametrize("after", ["another strategy", "a process group of the script's own"])
def test_options_are_compared_where_a_process_group_exists_already(after: str) -> None:
    with pytest.raises(mirrored.TowerFailedError) as caught:
        mirrored.launch(disagree_on_buckets, (after,), devices=["cpu:0", "cpu:1"])
    texts = [str(failure.exception) for failure in caught.value.failures]
    assert len(texts) == 2
    assert texts[0] == texts[1]
    assert "different communication options" in texts[0]
    assert "'bucket_bytes': 2000" in texts[0]


def convert(when: str, options: dict[str, Any]) -> None:
    """The model is converted: inside a step on all towers, or between two steps on the last tower alone."""
    strategy = mirrored.MirroredStrategy(seed=0, mirror_check_interval=None, **options)
    model = strategy.mirror(nn.Linear(2, 2, dtype=torch.float64))

    def step(number: int) -> None:
        if number == 2 and when == "inside":
            model.float()
        model.zero_grad()
        model(torch.ones(1, 2, dtype=model.weight.dtype)).sum().backward()

    for number in range(4):
        if number == 2 and when == "alone" and strategy.topology.index == 1:
            model.float()
        strategy.run(step, args=(number,))


@pytest.mark.parametrize(
    "options", [{}, {"communication": mirrored.CommunicationOptions(implementation="gloo")}], ids=["auto", "gloo"]
)
@pytest.mark.parametrize(
    ("when", "words"),
    [
        ("inside", r"parameter Linear.\w+ was converted inside a step on tower \d: its gradients were of torch.float"),
        ("alone", r"tower 1 is .*at a run\(\) after the model was converted or moved \(parameter Linear.\w+, now"),
    ],
)
def test_models_that_are_converted_on_the_way(when: str, words: str, options: dict[str, Any]) -> None:
    with pytest.raises(mirrored.TowerFailedError, match=words):
        mirrored.launch(convert, (when, options), towers=2, timeout=60)


def sparse_by_hand(strategy: mirrored.Strategy) -> None:
    tables = strategy.mirror(nn.ParameterList([torch.ones(4, 2)]))
    optimizer = torch.optim.SparseAdam(tables.parameters(), lr=0.1)

    def step() -> None:
        F.embedding(torch.tensor([1, 2]), next(tables.parameters()), sparse=True).sum().backward()
        optimizer.step()

    strategy.run(step)


def test_sparse_gradients_that_no_module_announces() -> None:
    for error in failures(sparse_by_hand):
        with pytest.raises(mirrored.MirrorError, match=r"those of ParameterList.0 are averaged as dense.*nn.Embedding"):
            raise error
