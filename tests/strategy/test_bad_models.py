"""Models that differ between towers, change while they train, or cannot be trained."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import mirrored
from tests.support.jobs import assert_close, failures, make_data, make_mlp, parameters_of, towers
from tests.support.logs import Records
from tests.support.waiting import HANG


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
        mirrored.launch(convert, (when, options), towers=2, timeout=HANG)


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
