"""Averages across hosts beside the backward: when they start, their numbers and bits, and how they fail."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mirrored
from tests.collectives.test_shared_memory import average_regions
from tests.support.jobs import assert_close, make_data, parameters_of, seeded, towers
from tests.support.meeting import meet
from tests.support.steps import averaging_step

EVERY_LAYER: dict[str, Any] = {"communication": mirrored.CommunicationOptions(bucket_bytes=64)}
"""A bucket for each parameter, or nearly."""


def make_model() -> nn.Sequential:
    return seeded(lambda: nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)), nn.Linear(5, 3)))


def begun_across_hosts(strategy: mirrored.Strategy) -> int:
    """How many averages this tower has begun with those of other hosts."""
    averager: Any = strategy.engine.averager
    lane = averager._channel._crossing._lane
    return 0 if lane is None else lane.count


def count_in_a_backward(strategy: mirrored.Strategy) -> list[int]:
    with strategy.scope():
        model = make_model()
    counts: list[int] = []

    def look(module: nn.Module, *_: object) -> None:
        if strategy.health.step == 3:
            meet(f"layer {len(counts)}")  # all towers have filled the buckets of the layers behind it
            counts.append(begun_across_hosts(strategy))

    for layer in model:
        layer.register_full_backward_hook(look)
    for _ in range(3):
        strategy.run(lambda: model(torch.ones(2, 5, requires_grad=True)).sum().backward())
    return [*counts, begun_across_hosts(strategy)]


@pytest.mark.parametrize("hosts", ["aabb", "aab"])
def test_buckets_cross_while_backward_runs(hosts: str) -> None:
    found = towers(count_in_a_backward, count=len(hosts), hosts=hosts, settings=EVERY_LAYER)
    for tower, (first, *counts) in enumerate(found):
        crosses = hosts == "aabb" or tower != 1  # the second tower of a host is a lane if all hosts have two
        assert (counts[-2] > first) == crosses, (tower, first, counts)
        assert (counts[-1] > counts[-2]) == crosses


def train(strategy: mirrored.Strategy) -> list[Tensor]:
    with strategy.scope():
        model = make_model().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = averaging_step(model, optimizer)
    for batch in strategy.distribute_dataset(torch.utils.data.TensorDataset(*make_data()), 16):
        strategy.run(step, args=batch)
    return parameters_of(model)


@pytest.mark.parametrize("hosts", ["aabb", "aab", "abba", "abbbc"])
def test_training_gives_the_numbers_of_one_device_and_the_same_bits_each_time(hosts: str) -> None:
    first, *others = towers(train, count=len(hosts), hosts=hosts, settings=EVERY_LAYER)
    assert_close(first, train(mirrored.OneDeviceStrategy(seed=0)), 1e-12)
    again, *_ = towers(train, count=len(hosts), hosts=hosts, settings=EVERY_LAYER)
    for other in (*others, again):
        assert all(map(torch.equal, other, first))


@pytest.mark.extended
@pytest.mark.parametrize(("hosts", "fails_on"), [("aabb", 1), ("aabb", 2), ("aab", 0), ("aabbb", 4)])
def test_without_room_for_a_shared_region_on_one_tower(hosts: str, fails_on: int) -> None:
    assert all(towers(average_regions, fails_on, count=len(hosts), hosts=hosts))


def fail_in_a_backward(strategy: mirrored.Strategy) -> None:
    with strategy.scope():
        model = make_model()

    def fail(*_: object) -> None:
        if strategy.health.step == 3 and strategy.topology.index == 3:
            raise ZeroDivisionError("in the first layer's backward")

    model[0].register_full_backward_hook(fail)
    for _ in range(3):
        strategy.run(lambda: model(torch.ones(2, 5, requires_grad=True)).sum().backward())


@pytest.mark.extended
def test_a_tower_that_fails_when_buckets_are_on_their_way_is_named() -> None:
    with pytest.raises(mirrored.TowerFailedError) as caught:
        towers(fail_in_a_backward, count=4, hosts="aabb", settings=EVERY_LAYER)
    assert re.match(r"tower 3 of 4 failed, in step 3, backward:", str(caught.value))
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
