"""Models that differ between towers, change while they train, or cannot be trained."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import mirrored
from tests.support.jobs import SETTINGS, all_raise, make_data, make_mlp, text_of, towers
from tests.support.logs import Records


def train_nothing(strategy: mirrored.Strategy, frozen: bool) -> tuple[list[float], str, list[str]]:
    records = Records()
    logging.getLogger("mirrored").addHandler(records)
    with strategy.scope():
        model: nn.Module = make_mlp().requires_grad_(False) if frozen else nn.ReLU()
    x, _ = make_data(4)
    evaluated = strategy.run(lambda: model(x).sum())
    error = text_of(RuntimeError, strategy.run, lambda: model(x).sum().backward())
    if frozen:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(2):
            strategy.run(optimizer.step)
    said = [message for message in records.messages if "trains nothing" in message]
    return [float(evaluated)], error, said


@pytest.mark.parametrize("frozen", [False, True], ids=["no parameters", "all frozen"])
@pytest.mark.row(24)
def test_nothing_to_train(frozen: bool) -> None:
    (first, error, said), second = towers(train_nothing, frozen)
    assert (first, error, said) == second
    assert "does not require grad" in error
    assert said == (["SGD.step() trains nothing: all of its 4 parameters are frozen (requires_grad is False)"] * frozen)


def in_order(*names: str) -> nn.Module:
    model = nn.Module()
    for name in names:
        setattr(model, name, nn.Parameter(torch.ones(1)))
    return model


DIFFERENT: dict[str, tuple[Callable[[bool], nn.Module], str]] = {
    "count": (
        lambda other: nn.Sequential(*[nn.Linear(2, 2) for _ in range(2 + other)]),
        "parameter Sequential.2.weight is on tower 1 but not on tower 0|Sequential.2.weight is missing",
    ),
    "shape": (
        lambda other: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 3 + other)),
        r"parameter Sequential.1.weight has shape \(3, 2\) on tower 0, but \(4, 2\) on tower 1",
    ),
    "buffer": (
        lambda other: nn.BatchNorm1d(2, track_running_stats=not other),
        "buffer BatchNorm1d.running_mean is missing on tower 1",
    ),
    "dtype": (
        lambda other: nn.Linear(2, 2, dtype=torch.float64 if other else torch.float32),
        "parameter Linear.weight has dtype torch.float32 on tower 0, but torch.float64 on tower 1",
    ),
    "order": (
        lambda other: in_order("a", "b") if other else in_order("b", "a"),
        "the order of parameters differs: Module.b on tower 0 is Module.a on tower 1",
    ),
    "trainable": (
        lambda other: nn.Linear(2, 2).requires_grad_(not other),
        "parameter Linear.weight is trainable on tower 0, but not on tower 1",
    ),
}
"""Models of tower 0 and of the other, and what is said of them."""


def differing_models(strategy: mirrored.Strategy, kind: str) -> None:
    with strategy.scope():
        model = DIFFERENT[kind][0](strategy.topology.index == 1)
    strategy.run(lambda: model)


@pytest.mark.parametrize("kind", DIFFERENT)
@pytest.mark.row(25, 26, 27)
def test_models_that_differ(kind: str) -> None:
    all_raise(mirrored.MirrorError, DIFFERENT[kind][1], differing_models, kind, same=True)


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
    words = r"would change Linear.scale, which no scope mirrored.*strategy.mirror\(module\)"
    for tower, text in enumerate(all_raise(mirrored.MirrorError, words, add_a_parameter, when)):
        assert f"step() on tower {tower} would" in text


def test_a_step_before_any_run_is_refused() -> None:
    all_raise(mirrored.MirrorError, r"never used in strategy.run\(...\)", add_a_parameter, "never run")


def leave_others_alone(strategy: mirrored.Strategy) -> float:
    """A model that is none of ours may be trained outside run, different on each tower."""
    model = strategy.mirror(nn.Linear(1, 1))
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
    bucket_bytes = 2000 if int(os.environ["RANK"]) else 1500
    mirrored.MirroredStrategy(communication=mirrored.CommunicationOptions(bucket_bytes=bucket_bytes))


@pytest.mark.parametrize("after", ["another strategy", "a process group of the script's own"])
def test_options_are_compared_where_a_process_group_exists_already(after: str) -> None:
    with pytest.raises(mirrored.TowerFailedError) as caught:
        mirrored.launch(disagree_on_buckets, (after,), devices=["cpu:0", "cpu:1"])
    first, second = (str(failure.exception) for failure in caught.value.failures)
    assert first == second
    assert "different communication options" in first
    assert "'bucket_bytes': 2000" in first


def convert(strategy: mirrored.Strategy, when: str) -> None:
    """The model is converted: inside a step on all towers, or between two steps on the last tower alone."""
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


@pytest.mark.extended
@pytest.mark.parametrize("setting", ["shared memory", "gloo"])
@pytest.mark.parametrize(
    ("when", "words"),
    [
        ("inside", r"parameter Linear.\w+ was converted inside a step on tower \d: its gradients were of torch.float"),
        ("alone", r"tower 1 is .*at a run\(\) after the model was converted or moved \(parameter Linear.\w+, now"),
    ],
)
def test_models_that_are_converted_on_the_way(when: str, words: str, setting: str) -> None:
    with pytest.raises(mirrored.TowerFailedError, match=words):
        towers(convert, when, settings={**SETTINGS[setting], "mirror_check_interval": None})


def sparse_by_hand(strategy: mirrored.Strategy) -> None:
    tables = strategy.mirror(nn.ParameterList([torch.ones(4, 2)]))
    optimizer = torch.optim.SparseAdam(tables.parameters(), lr=0.1)

    def step() -> None:
        F.embedding(torch.tensor([1, 2]), next(tables.parameters()), sparse=True).sum().backward()
        optimizer.step()

    strategy.run(step)


def test_sparse_gradients_that_no_module_announces() -> None:
    words = r"those of ParameterList.0 are averaged as dense.*nn.Embedding"
    all_raise(mirrored.MirrorError, words, sparse_by_hand)
