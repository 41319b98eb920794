"""Where a tower is: its steps and evaluations, its status record and its report of a failure."""

from __future__ import annotations

import itertools
import math
import os
import pathlib
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._utils import ExceptionWrapper
from torch.distributed import FileStore, PrefixStore

import mirrored
from tests.support.handshakes import serve, tower
from tests.support.hosts import on_small_disk
from tests.support.jobs import towers
from tests.support.programs import start_function
from towers.gradients.flags import BEFORE_ALL
from towers.health import heartbeat
from towers.health.failure import FailureReport
from towers.health.status import Health, StatusRecord, record_path
from towers.topology import STATUS_RECORD


def test_a_record_says_where_its_tower_is(tmp_path: pathlib.Path) -> None:
    health = Health(StatusRecord(record_path(tmp_path, 1), create=True))
    seen = StatusRecord.find(tmp_path, 1)
    places = [str(seen.read())]
    health.enter("loading data")
    places.append(str(seen.read()))
    health.begin_run(False)
    health.train()
    with health.at("reduce('sum')"):
        places.append(str(seen.read()))
    with pytest.raises(OSError), health.during("writing the checkpoint — " + "x" * 100):
        raise OSError
    places.append(str(seen.read()))
    health.end_run()
    places.append(str(seen.read()))
    assert places == [
        "before its first step",
        "before its first step, loading data",
        "in step 1, in the step's function, at reduce('sum')",
        "in step 1, writing the checkpoint — " + "x" * 37,
        "after step 1",
    ]
    assert StatusRecord.find(tmp_path, 2) is None


def test_a_file_gets_no_heartbeats(tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    """It would grow by every one of them, for as long as the training takes."""
    health = Health()
    store = PrefixStore("towers", FileStore(str(tmp_path / "store"), 2))
    heartbeat.start(health, tower(0, chief_serves=True), store, math.inf)
    assert health.heartbeat is None
    assert "initialised through a file, so towers send no heartbeats" in caplog.text


@pytest.mark.extended
def test_a_stack_is_asked_for_from_the_first_moment(tmp_path: pathlib.Path) -> None:
    """The towers are connected to the store where they ask when their heartbeats begin, however slow the machine is."""
    store = serve()
    healths = [Health(StatusRecord(record_path(tmp_path, index), create=True)) for index in range(2)]
    for index, health in enumerate(healths):
        heartbeat.start(health, tower(index), store, math.inf)
    assert healths[0].heartbeat is not None
    [peer] = healths[0].heartbeat.query([1], stacks=True)
    assert "test_a_stack_is_asked_for" in peer.stack


def test_a_report_is_foreign_data(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "error0.json"
    late = '{"message": {"extraInfo": {"time": "soon"}}}'
    for text in ("", "{", "[]", '{"message": 3}', late, "[" * 100_000, "\ud800"):
        path.write_text(text, errors="surrogatepass")
        assert FailureReport.read(path) is None
    assert FailureReport.of(ValueError("boom")).write(str(path))
    report = FailureReport.read(path)
    assert (report.short, report.consequence) == ("ValueError: boom", False)


def test_a_report_of_a_loaders_worker_says_what_it_raised_there() -> None:
    try:
        raise OSError("cannot read 77.png")
    except OSError:
        wrapped = ExceptionWrapper(where="in DataLoader worker process 1")
    with pytest.raises(OSError, match="Caught OSError in DataLoader worker process 1") as caught:
        wrapped.reraise()
    short = FailureReport.of(caught.value).short
    assert short == "OSError: cannot read 77.png (in worker process 1 of a DataLoader)"


def test_a_run_counts_as_a_step_when_it_trains() -> None:
    health = Health(StatusRecord())
    places = []

    def run(evaluates: bool, trains: bool) -> None:
        health.begin_run(evaluates)
        places.append(str(health.status))
        if trains:
            health.train()
            places.append(str(health.status))
        health.end_run()
        places.append(str(health.status))

    run(evaluates=True, trains=False)
    run(evaluates=False, trains=True)
    run(evaluates=False, trains=False)  # it had seemed to train
    run(evaluates=True, trains=True)  # it had not
    run(evaluates=True, trains=False)
    assert places == [
        "in an evaluation before its first step, in the evaluation's function",
        "before its first step",
        *["in step 1, in the step's function"] * 2,
        "after step 1",
        "in step 2, in the step's function",
        "after step 1",
        "in an evaluation after step 1, in the evaluation's function",
        "in step 2, in the step's function",
        "after step 2",
        "in an evaluation after step 2, in the evaluation's function",
        "after step 2",
    ]
    assert health.run == 5


def test_where_the_script_counts_its_steps_several_runs_may_be_one() -> None:
    health = Health(StatusRecord())
    health.go_on_after(20)
    assert str(health.status) == "after step 20"
    steps = []
    for run in range(1, 5):
        health.begin_run(False)
        health.train()
        steps.append(health.step)
        health.end_run()
        if run % 2 == 0:
            health.count(20 + run // 2)
    assert steps == [21, 22, 22, 22]  # each run is a step until the script has counted


def counted(strategy: mirrored.Strategy) -> list[tuple[int, bool]]:
    """The number of steps after each run, and whether the run was none, of loops of many kinds."""
    with strategy.scope():
        model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    apart = torch.optim.SGD(other.parameters(), lr=0.1)
    counts: list[tuple[int, bool]] = []

    def run(fn: Callable[..., object], *args: object) -> None:
        strategy.run(fn, args)
        counts.append((strategy.health.step, strategy.health.evaluates))

    def forward(layer: nn.Module = model) -> torch.Tensor:
        loss: torch.Tensor = layer(torch.ones(1, 2)).sum()
        return loss

    def step(trains: bool) -> None:
        optimizer.zero_grad()
        loss = forward()
        if trains:
            loss.backward()
            optimizer.step()

    def accumulate(steps: bool) -> None:
        forward().backward()
        if steps:
            optimizer.step()

    def look() -> None:
        forward()

    def clear() -> None:
        optimizer.zero_grad()
        apart.zero_grad()

    run(look)  # in training mode, with gradients, before anything was trained
    for trains in (True, True, False, True, False, False):
        model.train(trains)
        other.train(trains)
        run(step, trains)
    model.train()
    for steps in (False, False, True, False, True):
        run(accumulate, steps)
    for _ in range(2):
        run(lambda: forward(other).backward())
        apart.step()  # outside
        run(look)
        run(clear)
    with torch.no_grad():
        run(look)
    return counts


def test_one_tower_counts_the_steps_of_several() -> None:
    [alone] = towers(counted, count=1)
    assert towers(counted) == [alone] * 2
    evaluates = [evaluates for _, evaluates in alone]
    assert evaluates == [True, False, False, True, False, True, True, *[False] * 5, *[False, True, True] * 2, True]
    assert [step for step, _ in alone] == list(itertools.accumulate(not each for each in evaluates))


def train_and_evaluate(strategy: mirrored.Strategy, folder: str, at: int) -> tuple[list[str], str]:
    """Three steps and two evaluations, one without eval(); fails in the second evaluation's run number ``at``."""
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    places, evaluations = [], 0

    def note() -> None:
        places.append(strategy.health.status.when)

    def train_step() -> None:
        note()
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    @torch.no_grad()
    def look() -> None:
        note()

    def evaluate() -> None:
        nonlocal evaluations
        note()
        evaluations += 1
        if evaluations == at and strategy.topology.index == 1:
            raise ValueError("boom")

    checkpoints = mirrored.CheckpointManager(strategy, folder, {"model": model, "optimizer": optimizer})
    with checkpoints.resume():
        for _ in range(2):
            model.eval()
            strategy.run(evaluate)
            model.train()
            strategy.run(look)
            for _ in range(2):
                strategy.run(train_step)
                checkpoints.step()
    return places, strategy.health.status.when


def test_failures_and_checkpoints_have_one_count_of_steps(tmp_path: pathlib.Path) -> None:
    for places, after in towers(train_and_evaluate, str(tmp_path), 0):
        assert places == [
            "in an evaluation before its first step",
            "in step 1",  # the function is not known yet
            "in step 1",
            "in step 2",
            "in an evaluation after step 2",
            "in an evaluation after step 2",
            "in step 3",
            "in step 4",
        ]
        assert after == "after step 4"
    assert (tmp_path / "step-00000004").exists()
    with pytest.raises(mirrored.TowerFailedError, match="tower 1 of 2 failed, in an evaluation after step 6, in the"):
        towers(train_and_evaluate, str(tmp_path), 2)


def test_a_backward_after_an_evaluation_is_told_by_step_and_run() -> None:
    health = Health(StatusRecord())
    backward = BEFORE_ALL
    said = []
    for evaluates in (False, True, False):
        health.begin_run(evaluates)
        if not evaluates:
            health.train()
            backward = backward.next(health.place)
            said.append(str(backward))
        health.end_run()
    assert said == ["backward() number 1 of step 1", "backward() number 1 of step 2, in call 3 of strategy.run,"]


def begin_on_a_full_disk(folder: str) -> None:
    pathlib.Path(folder, "full").write_bytes(bytes(4096))
    os.environ[STATUS_RECORD] = str(record_path(folder, 0))
    print(Health.of_this_tower("starting").status, StatusRecord.find(folder, 0))


@pytest.mark.extended
def test_a_full_disk_ends_no_tower(tmp_path: pathlib.Path) -> None:
    command = start_function(begin_on_a_full_disk, str(tmp_path), before=on_small_disk(tmp_path, 4096))
    output, errors = command.communicate()
    if "Operation not permitted" in errors:
        pytest.skip("a small file system needs permission to mount it")
    assert (output, command.returncode) == ("before its first step, starting None\n", 0), errors
