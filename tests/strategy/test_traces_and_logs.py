"""What a person who profiles or debugs sees of a step: ranges in the profiler's trace, and log lines."""

from __future__ import annotations

import json
import pathlib

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import mirrored
from tests.support.jobs import towers
from tests.support.programs import run_program
from towers.system.profiling import range_


def trace_of(strategy: mirrored.Strategy, path: str) -> list[tuple[str, float, float]]:
    """Three steps and a reduced loss under a profiler: our ranges in its trace, with begin and end in µs."""
    with strategy.scope():
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = strategy.distribute_dataset((torch.randn(9, 4), torch.randn(9, 1)), 4)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = mirrored.compute_average_loss((model(x) - y).square().mean(1))
        loss.backward()
        optimizer.step()
        return loss.detach()

    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for batch in data:
            strategy.reduce("sum", strategy.run(step, args=batch))
    name = f"{path}.{strategy.topology.index}"
    profiler.export_chrome_trace(name)
    events = json.loads(pathlib.Path(name).read_text())["traceEvents"]
    ours = [event for event in events if event["name"].startswith("mirrored::") and "dur" in event]
    return sorted((event["name"], float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in ours)


def test_a_step_of_two_towers_has_its_phases_in_the_trace(tmp_path: pathlib.Path) -> None:
    for ranges in towers(trace_of, str(tmp_path / "trace")):
        count = {name: sum(other == name for other, _, _ in ranges) for name, _, _ in ranges}
        assert count["mirrored::run"] == count["mirrored::optimizer-step"] == count["mirrored::reduce"] == 3
        assert count["mirrored::bucket"] == count["mirrored::wait"] == count["mirrored::average"] == 3
        assert count["mirrored::data"] == 4  # the last wait finds the end of the epoch
        assert count["mirrored::mirror"] == count["mirrored::mirror-check"] == 1
        runs = [(begin, end) for name, begin, end in ranges if name == "mirrored::run"]
        steps = [(begin, end) for name, begin, end in ranges if name == "mirrored::optimizer-step"]
        assert all(run[0] < step[0] < step[1] < run[1] for run, step in zip(runs, steps, strict=True))


def names_of_other_ranges(strategy: mirrored.Strategy) -> list[str]:
    sharding = mirrored.MirroredStrategy(shard_optimizer=True)
    with sharding.scope():
        sharded = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)

    def sharded_step() -> None:
        sharded(torch.randn(4, 4)).sum().backward()
        optimizer.step()

    with strategy.scope(sync_batch_norm=True):
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    virtual = mirrored.MirroredStrategy(virtual_towers=4)
    with virtual.scope():
        other = nn.Linear(4, 1)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        sharding.run(sharded_step)
        strategy.run(lambda: model(torch.randn(4, 4)).sum().backward())
        virtual.run(lambda: virtual.backward(lambda x: other(x).square().mean(1), torch.randn(4, 4)))
    return [event.key for event in profiler.key_averages()]


def test_other_collectives_of_a_step_are_named_too() -> None:
    for names in towers(names_of_other_ranges):
        assert {"mirrored::batch-norm", "mirrored::virtual-tower", "mirrored::sharded-step"} <= set(names)


def test_without_a_profiler_there_is_no_range() -> None:
    assert range_("mirrored::run") is range_("mirrored::data")
    with profile(activities=[ProfilerActivity.CPU]) as profiler, range_("mirrored::run"):
        pass
    assert "mirrored::run" in [event.key for event in profiler.key_averages()]


SCRIPT = """
import mirrored
strategy = mirrored.MirroredStrategy(["cpu:0"])
print(len(list(strategy.distribute_dataset(range(4), 2))))
"""


@pytest.mark.extended
def test_the_level_of_the_log_comes_from_the_environment(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def log_at(level: str) -> str:
        ended = run_program([str(script)], env={"MIRRORED_LOG_LEVEL": level})
        assert (ended.returncode, ended.stdout.strip()) == (0, "2"), ended.stderr
        return ended.stderr

    debug = log_at("Debug")
    assert " ms: attached to tower 0: nothing" in debug
    assert " ms: epoch 0 of a distributed dataset starts at step 0" in debug
    assert log_at("warning") == ""
    assert "epoch" not in log_at("")
    assert "MIRRORED_LOG_LEVEL is 'loud', but must be one of debug, info, warning, error, critical" in log_at("loud")
