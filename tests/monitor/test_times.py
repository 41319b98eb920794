"""What a monitor says of the time of steps. The clocks are the tests' own: they go on where a test lets them."""

from __future__ import annotations

import mmap
import pathlib
import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import mirrored
from mirrored.monitor.report import PARTS, Report, add_times, sums
from tests.support.jobs import SETTINGS, towers
from tests.support.waiting import wait_until
from towers.health.status import AVERAGING
from towers.system.timeouts import clock

Spend = Callable[[float], None]


class SharedClock:
    """A clock of all towers, in a file: it goes on when one of them spends time. Beside it each tower can count."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._numbers = memoryview(mmap.mmap(file.fileno(), 64)).cast("d")
        clock.monotonic = lambda: self._numbers[0]  # type: ignore[method-assign]

    def spend(self, seconds: float) -> None:
        self._numbers[0] += seconds

    def count(self, tower: int) -> None:
        self._numbers[1 + tower] += 1

    def wait_for(self, tower: int, count: int) -> None:
        """Return when a tower has counted that far."""
        wait_until(lambda: self._numbers[1 + tower] >= count)


class SlowExamples(Dataset[Tensor]):
    """Eight examples, each of which takes 5 ms to load."""

    def __init__(self, spend: Spend) -> None:
        self._spend = spend

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        self._spend(0.005)
        return torch.full((2,), float(index))


class SlowSGD(torch.optim.SGD):
    """A step takes 3 ms."""

    spend: Spend

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.spend(0.003)
        super().step()


def parts_of_one_tower(strategy: mirrored.Strategy, path: str, evaluates: bool) -> list[Report]:
    """Two reports of two epochs of two steps each, with an evaluation between the epochs, or without."""
    shared = SharedClock(path)
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = SlowSGD(model.parameters(), lr=0.5)
    optimizer.spend = shared.spend
    data = strategy.distribute_dataset(SlowExamples(shared.spend), 4)

    def step(x: Tensor) -> Tensor:
        loss = mirrored.compute_average_loss(model(x).square().mean(1))
        loss.backward()
        shared.spend(0.010)
        optimizer.step()
        shared.spend(0.001)
        return loss.detach()

    monitor = mirrored.Monitor(strategy, every=2, show=False)
    reports = []
    for _ in range(2):
        for batch in data:
            loss = strategy.run(step, args=(batch,))
            shared.spend(0.002)
            reports.append(monitor.step(loss))
        if evaluates:
            with monitor.paused():
                for batch in data:
                    strategy.run(model, args=(batch,))
                    shared.spend(1.0)
    return [report for report in reports if report is not None]


@pytest.fixture
def path(tmp_path: pathlib.Path) -> str:
    """The file of a shared clock, which begins where the system's is, as heartbeats do."""
    file = tmp_path / "clock"
    file.write_bytes(struct.pack("=8d", time.monotonic(), *[0.0] * 7))
    return str(file)


@pytest.mark.parametrize("evaluates", [False, True])
def test_the_parts_of_a_step_add_up_to_it(path: str, evaluates: bool) -> None:
    [reports] = towers(parts_of_one_tower, path, evaluates, count=1)
    assert [(report.step, report.steps) for report in reports] == [(2, 1), (4, 2)]
    for report in reports:
        expected = {"data": 20.0, "compute": 11.0, "wait": 0.0, "move": 0.0, "optimizer": 3.0, "other": 2.0}
        assert report.parts_ms == pytest.approx(expected)
        assert report.step_ms == pytest.approx(36.0)
        assert report.examples_per_second == pytest.approx(4 / 0.036)
        assert (report.slowest_tower, report.learning_rate) == (None, 0.5)


def report_of_a_slow_tower(strategy: mirrored.Strategy, path: str) -> Report | None:
    """Of four steps in which tower 1 computes 30 ms longer, while the others wait for it."""
    shared, me, slow = SharedClock(path), strategy.topology.index, 1
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    monitor = mirrored.Monitor(strategy, every=5, show=False)
    strategy.events.phase.append(lambda phase: shared.count(me) if phase == AVERAGING else None)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).mean()
        if me == slow:
            for other in range(strategy.num_replicas_in_sync):
                if other != slow:
                    shared.wait_for(other, monitor.steps + 1)
            shared.spend(0.030)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for _ in range(5):
        monitor.step(strategy.run(step, args=(torch.ones(3, 2),)))
    return monitor.report


@pytest.mark.extended
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("way", SETTINGS)
def test_a_slow_tower_is_named(way: str, count: int, path: str) -> None:
    for report in towers(report_of_a_slow_tower, path, count=count, settings=SETTINGS[way]):
        assert report.slowest_tower == 1
        assert report.slowest_part == "compute"
        assert report.slowest_by_ms == pytest.approx(30.0)
        waiting = 30.0 * (count - 1) / count  # the mean over the towers, one of which does not wait
        assert report.parts_ms["wait"] == pytest.approx(waiting)
        assert report.parts_ms["compute"] == pytest.approx(30.0 / count)
        assert sum(report.parts_ms.values()) == pytest.approx(report.step_ms) == pytest.approx(30.0)


def test_waiting_is_what_towers_spend_beyond_the_last_one_in_each_step() -> None:
    first = sums([[0, 5, 9, 0, 0], [0, 9, 5, 0, 0]])  # each tower is late once, by 4 s
    second = sums([[0, 9, 5, 0, 0], [0, 5, 9, 0, 0]])
    report = Report(2, 2)
    add_times(report, np.stack([first, second]))
    expected = {"data": 0.0, "compute": 7e3, "wait": 2e3, "move": 5e3, "optimizer": 0.0, "other": 0.0}
    assert report.parts_ms == pytest.approx(expected)
    assert tuple(report.parts_ms) == PARTS
    assert report.slowest_by_ms == pytest.approx(0.0)


def evaluations_are_left_out(strategy: mirrored.Strategy, gradients: bool) -> Report | None:
    now = [time.monotonic()]  # of this tower alone

    def spend(seconds: float) -> None:
        now[0] += seconds

    clock.monotonic = lambda: now[0]  # type: ignore[method-assign]
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    train = strategy.distribute_dataset(torch.ones(12, 2), 4)
    test = strategy.distribute_dataset(torch.ones(40, 2), 20)
    monitor = mirrored.Monitor(strategy, every=3, show=False)

    def step(x: Tensor) -> None:
        mirrored.compute_average_loss(model(x).mean(1)).backward()
        optimizer.step()
        spend(0.5)

    def test_step(x: Tensor) -> int:
        spend(1.0)
        return len(x)

    for number, batch in enumerate(train):
        strategy.run(step, args=(batch,))
        with torch.set_grad_enabled(gradients):  # with gradients, the first evaluation seems to train
            for examples in test if number > 0 else ():  # the first step is not measured
                strategy.reduce("sum", strategy.run(test_step, args=(examples,)))
                spend(0.25)
        monitor.step()
    return monitor.report


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("gradients", [False, True])
def test_runs_that_evaluate_are_left_out_by_themselves(count: int, gradients: bool) -> None:
    """Their examples, too."""
    for report in towers(evaluations_are_left_out, gradients, count=count):
        assert report.step_ms == pytest.approx(500.0)
        assert report.examples_per_second == pytest.approx(8.0)
        assert report.loss is None
