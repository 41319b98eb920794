"""One trace of several towers: who is in it, on which clock, what a step was spent on, and mistakes in its use."""

from __future__ import annotations

import gzip
import json
import os
import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import mirrored
from mirrored.monitor.report import PARTS
from mirrored.monitor.tracing import Trace, by_clock_of_tower_0, difference_of_clocks
from tests.support.jobs import all_raise, text_of, towers
from towers.system.timeouts import clock

Event = dict[str, Any]


class Training:
    """A small model of a strategy, and steps on nine examples."""

    def __init__(self, strategy: mirrored.Strategy) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.model = nn.Linear(4, 1)
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.data = strategy.distribute_dataset(torch.randn(9, 4), 3)

    def step(self, x: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        mirrored.compute_average_loss(self.model(x).square().mean(1)).backward()
        self.optimizer.step()

    def epoch(self) -> None:
        for batch in self.data:
            self.strategy.run(self.step, args=(batch,))


def traced(strategy: mirrored.Strategy, path: str, ahead: float = 0.0) -> tuple[Trace, int]:
    """The second of three epochs is traced, with an evaluation in it.

    Args:
        ahead: how many seconds tower 1's clock is ahead of the others'.
    """
    if strategy.topology.index == 1:
        clock.wall_time = lambda: now() + ahead  # type: ignore[method-assign]
    training = Training(strategy)
    training.epoch()
    with strategy.trace(path) as trace:
        training.epoch()
        with torch.no_grad():
            strategy.run(lambda: training.model(torch.ones(2, 4)))
        strategy.barrier()
    training.epoch()
    return trace, os.getpid()


now = clock.wall_time


def by_tower(path: pathlib.Path) -> dict[int, list[Event]]:
    """The events of a file, by tower."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    events = json.loads(text)["traceEvents"]
    towers = sorted({event["pid"] // 1000 - 1 for event in events})
    return {tower: [event for event in events if event["pid"] // 1000 - 1 == tower] for tower in towers}


def spans(events: list[Event], name: str) -> list[tuple[float, float]]:
    """Begins and ends of the ranges whose names begin with ``name``, in µs."""
    found = [event for event in events if event["ph"] == "X" and event["name"].startswith(f"mirrored::{name}")]
    return sorted((event["ts"], event["ts"] + event["dur"]) for event in found)


def named(events: list[Event]) -> list[str]:
    return [event["args"]["name"] for event in events if event["name"] == "process_name"]


@pytest.mark.parametrize("ending", ["", ".gz"])
def test_towers_are_side_by_side_with_our_ranges_in_their_steps(tmp_path: pathlib.Path, ending: str) -> None:
    path = tmp_path / f"deep/trace.json{ending}"
    results = towers(traced, str(path))
    events = by_tower(path)
    assert list(events) == [0, 1]
    for tower, (trace, _) in enumerate(results):
        assert named(events[tower]) == [trace.towers[tower]]
        assert trace.towers[tower].startswith(f"tower {tower} (cpu")
        steps, runs = spans(events[tower], "step "), spans(events[tower], "run")
        assert (len(steps), len(runs), len(spans(events[tower], "optimizer-step"))) == (3, 4, 3)
        inner = [*runs[:3], *spans(events[tower], "data")[:3], *spans(events[tower], "average")]
        for begin, end in inner:
            assert sum(step[0] <= begin <= end <= step[1] for step in steps) == 1
        assert len({event["name"] for event in events[tower] if event["name"].startswith("mirrored::step ")}) == 3
    ids = [{event["id"] for event in events[tower] if event["ph"] == "s"} for tower in (0, 1)]
    assert ids[0]
    assert not ids[0] & ids[1]  # arrows do not go from one tower to another


def test_no_tower_leaves_an_average_before_the_other_has_come(tmp_path: pathlib.Path) -> None:
    towers(traced, str(tmp_path / "trace.json"))
    first, second = by_tower(tmp_path / "trace.json").values()
    pairs = list(zip(spans(first, "average"), spans(second, "average"), strict=True))
    assert len(pairs) == 3
    assert all(max(begin for begin, _ in pair) < min(end for _, end in pair) for pair in pairs)


def test_the_summary_has_the_parts_of_each_tower(tmp_path: pathlib.Path) -> None:
    for trace, _ in towers(traced, str(tmp_path / "trace.json")):
        assert (trace.report.step, trace.report.steps, trace.clock_error_ms) == (6, 3, 0)
        assert [list(parts) for parts in trace.parts_ms] == [list(PARTS)] * 2
        means = [np.mean([parts[name] for parts in trace.parts_ms]) for name in PARTS]
        assert list(trace.report.parts_ms.values()) == pytest.approx(means)
        assert trace.report.step_ms == pytest.approx(sum(means))
        title, _, *rows, slowest = str(trace).splitlines()
        assert "steps 4 to 6" in title
        assert [row.split()[1] for row in rows] == ["0", "1"]
        assert slowest.startswith("slowest: tower ")


def test_one_tower_has_a_trace_of_the_same_steps(tmp_path: pathlib.Path) -> None:
    [(trace, _)] = towers(traced, str(tmp_path / "trace.json"), count=1)
    assert (trace.report.step, trace.report.steps) == (6, 3)
    assert len(spans(by_tower(tmp_path / "trace.json")[0], "step ")) == 3


# -- clocks --------------------------------------------------------------------------------------------------


def test_clocks_of_other_hosts_are_compared(tmp_path: pathlib.Path) -> None:
    """The profiler does not see that tower 1's clock is ahead, so the trace puts its events back by an hour."""
    settings = {"communication": mirrored.CommunicationOptions(implementation="gloo")}
    path = tmp_path / "trace.json"
    results = towers(traced, str(path), 3600.0, hosts="ab", settings=settings)
    error = 1e3 * results[0][0].clock_error_ms
    assert 0 < error < 3600e6
    assert "the hosts' clocks are aligned to" in str(results[1][0])
    first, second = by_tower(path).values()
    back = [(begin + 3600e6, end + 3600e6) for begin, end in spans(second, "average")]
    for own, other in zip(spans(first, "average"), back, strict=True):
        assert max(own[0], other[0]) < min(own[1], other[1]) + error


def test_the_narrowest_bounds_count() -> None:
    stamps = np.array(
        [
            [[10.0, 13.0], [20.0, 21.0], [30.0, 34.0]],
            [[4.0, 7.5], [14.5, 15.5], [24.0, 28.0]],
            [[4.0, 8.0], [14.9, 15.9], [24.0, 28.0]],
        ]
    )
    low, high = 20 - 15.5, 21 - 14.9
    expected = ((low + high) / 2, (high - low) / 2)
    assert difference_of_clocks(stamps, np.array([False, True, True])) == pytest.approx(expected)


def test_nested_events_stay_nested_by_another_clock() -> None:
    clocks = [(1.0, 3600.0), (2.0, 3600.1)]  # tower 0's runs faster
    step = by_clock_of_tower_0(1.5e6, 1000.0, clocks)
    within = by_clock_of_tower_0(1.5e6 + 900, 100.0, clocks)
    assert within == pytest.approx((step[0] + 990, step[1]))
    assert step == pytest.approx((1.5e6 + 3600.05e6, 1.5e6 + 3600.05e6 + 1100))


# -- mistakes ------------------------------------------------------------------------------------------------


def within_another(strategy: mirrored.Strategy, folder: str) -> None:
    with strategy.trace(f"{folder}/a.json"), strategy.trace(f"{folder}/b.json"):
        pass


def within_run(strategy: mirrored.Strategy, folder: str) -> None:
    def step() -> None:
        with strategy.trace(f"{folder}/a.json"):
            pass

    strategy.run(step)


@pytest.mark.row(77)
def test_a_trace_is_refused_where_none_can_be(tmp_path: pathlib.Path) -> None:
    strategy = mirrored.OneDeviceStrategy("cpu")
    assert "while another trace or profiler runs" in text_of(RuntimeError, within_another, strategy, str(tmp_path))
    assert "inside strategy.run" in text_of(RuntimeError, within_run, strategy, str(tmp_path))
    within = strategy.trace(str(tmp_path / "a.json"))
    with within:  # the one that failed has left nothing that runs
        pass


@pytest.mark.row(77)
def test_a_file_that_cannot_be_written_is_an_error_on_all_towers(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").touch()
    all_raise(ValueError, "on tower 0: .*file", traced, str(tmp_path / "file/trace.json"), same=True)


def fails(strategy: mirrored.Strategy, path: str) -> str:
    training = Training(strategy)
    try:
        with strategy.trace(path):
            training.epoch()
            raise KeyError("the script's own")
    except KeyError:
        training.epoch()
    with strategy.trace(path) as trace:
        training.epoch()
    return str(trace)


def test_an_exception_ends_a_trace(tmp_path: pathlib.Path) -> None:
    for text in towers(fails, str(tmp_path / "trace.json")):
        assert "steps 7 to 9" in text
