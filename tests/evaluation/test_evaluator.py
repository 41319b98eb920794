"""The evaluator evaluates each checkpoint once, keeps a table and the best, and asks to stop training early."""

from __future__ import annotations

import json
import logging
import math
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import mirrored
from mirrored.checkpoint.folder import STOP, Disk, Folder
from mirrored.checkpoint.manifest import name_of
from mirrored.evaluation import EarlyStopping, Evaluator, Exporter
from tests.support.children import in_a_child
from tests.support.jobs import all_raise, towers

fast = pytest.mark.usefixtures("lockstep")  # an end that was there before counts after a minute of that clock


def losses(folder: pathlib.Path, values: list[float], keep: int = 100, ends: bool = True) -> None:
    """A run whose weights are the losses that the evaluator finds, one for each step."""
    strategy = mirrored.OneDeviceStrategy()
    with strategy.scope():
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1))
    manager = mirrored.CheckpointManager(strategy, folder, {"model": model, "progress": {}}, every_steps=1, keep=keep)
    with manager.resume():
        for value in values:
            nn.init.constant_(model[0].weight, value)
            manager.step()
    if not ends:
        (folder / ".ended").unlink()


def evaluator(folder: Any, **settings: Any) -> Evaluator:
    strategy = settings.pop("strategy", None) or mirrored.OneDeviceStrategy()
    with strategy.scope():
        model = settings.pop("model", None) or nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1))

    def evaluate() -> Mapping[str, Any]:
        assert not torch.is_grad_enabled()
        assert not any(layer.training for layer in model.modules())
        return {"loss": model[0].weight.mean()}

    return Evaluator(strategy, folder, {"model": model}, **{"evaluate": evaluate, **settings})


def found(folder: Any, **settings: Any) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in evaluator(folder, **settings).run()]


@fast
def test_each_checkpoint_is_a_row_of_the_table(folder: pathlib.Path) -> None:
    losses(folder, [3.0, 1.0, 2.0])
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1))
    model[1].eval()  # a layer that the script has frozen
    assert found(folder, model=model) == [(1, 3.0), (2, 1.0), (3, 2.0)]
    assert (model.training, model[0].training, model[1].training) == (True, True, False)
    rows = [json.loads(line) for line in (folder / "evaluation" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 3.0), (2, 1.0), (3, 2.0)]
    assert len({row["sha256"] for row in rows}) == 3
    assert len(list((folder / "evaluation").glob("events.out.tfevents.*"))) == 1


@fast
def test_an_evaluator_that_is_started_again_goes_on(folder: pathlib.Path) -> None:
    best = Exporter("best", "loss")
    losses(folder, [3.0, 1.0])
    assert len(found(folder, exporters=[best])) == 2
    file = folder / "evaluation" / "metrics.jsonl"
    table = file.read_text()
    file.write_text(f'{table}{{"loss": 0.')  # as a killed evaluator may leave it
    losses(folder, [2.0, 1.0])
    assert found(folder, exporters=[best]) == [(1, 3.0), (2, 1.0), (3, 2.0), (4, 1.0)]
    assert file.read_text().startswith(f'{table}{{"loss": 2.0')
    assert restored_step(folder) == 2, "an equal value is not better"


@fast
def test_one_process_evaluates_into_a_table(folder: pathlib.Path) -> None:
    losses(folder, [3.0])
    first = evaluator(folder)
    first.run()
    assert "give each evaluation its own name" in in_a_child(lambda: evaluator(folder).run())
    assert evaluator(folder, name="two").run() == first.run()


@fast
def test_each_evaluation_keeps_a_checkpoint_of_its_own(folder: pathlib.Path) -> None:
    losses(folder, [1.0, 3.0])
    evaluator(folder, exporters=[Exporter("best", "loss")]).run()
    evaluator(folder, exporters=[Exporter("best", "loss", higher_is_better=True)], name="two").run()
    assert (restored_step(folder), restored_step(folder, "best-two")) == (1, 2)
    assert (folder / "evaluation-two" / "best").is_dir()


@fast
def test_a_run_that_starts_leaves_alone_what_an_evaluator_writes(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses(folder, [3.0, 1.0])
    rename = Disk.rename

    def rename_beside(disk: Disk, old: pathlib.Path, new: pathlib.Path) -> None:
        Folder(folder, Disk()).clean()
        rename(disk, old, new)

    with monkeypatch.context() as patch:
        patch.setattr(Disk, "rename", rename_beside)
        evaluator(folder, exporters=[Exporter("best", "loss")]).run()
    assert restored_step(folder) == 2
    os.rename(folder / "best", folder / ".evaluation.replacing-best")  # as a killed evaluator leaves it
    (folder / ".evaluation.saving-best-1").mkdir()
    assert len(evaluator(folder).run()) == 2
    assert restored_step(folder) == 2
    assert not list(folder.glob(".evaluation.*"))


@pytest.mark.extended
@fast
def test_its_folders_are_its_owners_alone(folder: pathlib.Path) -> None:
    with pytest.raises(mirrored.CheckpointError, match="no new checkpoint in"):
        evaluator(folder).run()
    assert [path.stat().st_mode & 0o777 for path in (folder, folder / "evaluation")] == [0o700] * 2


def restored_step(folder: pathlib.Path, name: str = "best") -> int:
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1))
    manager = mirrored.CheckpointManager(mirrored.OneDeviceStrategy(), folder, {"model": model, "progress": {}})
    return manager.restore(name).step


@fast
def test_the_best_outlives_its_checkpoint_and_is_restored(folder: pathlib.Path) -> None:
    losses(folder, [3.0, 1.0, math.nan, 2.0])
    exporters = [Exporter("best", "loss"), Exporter("worst", "loss", higher_is_better=True), Exporter("latest")]
    evaluator(folder, exporters=exporters).run()
    losses(folder, [5.0, 6.0], keep=2)
    assert sorted(path.name for path in folder.glob("step-*")) == [name_of(5), name_of(6)]
    assert restored_step(folder) == 2
    exported = {name: load_file(folder / "evaluation" / name / "model.safetensors") for name in ("best", "latest")}
    assert exported["best"]["0.weight"].item() == 1.0
    assert exported["latest"]["0.weight"].item() == 2.0
    assert not (folder / "latest").is_dir()
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.BatchNorm1d(1))
    report = mirrored.load_weights(model, folder / "evaluation" / "worst" / "model.safetensors")
    assert not report.kept
    assert model[0].weight.item() == 3.0


@pytest.mark.parametrize(
    ("values", "stopping", "stops"),
    [
        ([3.0, 2.0, 2.0, 2.0], EarlyStopping("loss", 2), True),
        ([3.0, 2.0, 2.0, 2.0], EarlyStopping("loss", 3), False),
        ([3.0, 2.0, 2.0, 1.0], EarlyStopping("loss", 2), False),
        ([1.0, 2.0, 3.0, 4.0], EarlyStopping("loss", 2, higher_is_better=True), False),
        ([1.0, 2.0, 3.0, 4.0], EarlyStopping("loss", 3), True),
        ([1.0, 2.0, 3.0, 4.0], EarlyStopping("loss", 3, min_steps=2), False),
        ([1.0, 2.0, 3.0, 4.0], EarlyStopping("loss", 1, min_steps=9), False),
        ([math.nan, 2.0, math.nan, math.nan], EarlyStopping("loss", 2), True),
    ],
)
def test_training_is_asked_to_stop(values: list[float], stopping: EarlyStopping, stops: bool) -> None:
    """As TensorFlow's hook: the step of the last evaluation, less that of the best, is the limit or more."""
    rows = [{"step": step, "loss": value} for step, value in enumerate(values, 1)]
    assert bool(stopping.reason(rows)) == stops


def test_an_earlier_runs_values_do_not_count() -> None:
    """After a run of three steps another one has begun anew."""
    values = [(1, 3.0), (2, 1.0), (3, 1.5), (1, 9.0), (2, 8.0), (3, 7.0)]
    rows = [{"step": step, "loss": value} for step, value in values]
    assert not EarlyStopping("loss", 1).reason(rows)
    assert EarlyStopping("loss", 2).reason([*rows, {"step": 4, "loss": 7.5}, {"step": 5, "loss": math.nan}])


def test_nan_is_not_the_best() -> None:
    rows = [{"step": 1, "loss": math.nan}]
    for best in (Exporter("best", "loss"), Exporter("best", "loss", higher_is_better=True)):
        assert not best.chooses(rows)
        assert best.chooses([*rows, {"step": 2, "loss": math.inf}])


@fast
def test_the_request_reaches_a_run(folder: pathlib.Path) -> None:
    """A run that has ended is not asked; one that goes on sees the request within ten steps, saves, and ends."""
    losses(folder, [1.0, 2.0])
    evaluator(folder, stop=EarlyStopping("loss", 1)).run()
    assert not (folder / STOP).exists()
    losses(folder, [3.0], ends=False)
    evaluator(folder, stop=EarlyStopping("loss", 1), timeout_seconds=10).run()
    assert (folder / STOP).read_text() == "loss has not become better for 2 steps"


def _runs_until_it_is_stopped(strategy: mirrored.Strategy, folder: str) -> Any:
    manager = mirrored.CheckpointManager(strategy, folder, {"progress": {}})
    with manager.resume():
        for _ in range(13):
            manager.step()
        if strategy.is_chief:
            (pathlib.Path(folder) / STOP).write_text("enough")
        while True:
            manager.step()
    return manager.steps, manager.latest


@pytest.mark.parametrize("count", [1, 2])
def test_all_towers_stop_at_one_step_and_have_saved_it(folder: pathlib.Path, count: int) -> None:
    step = {1: 20, 2: 21}[count]  # several towers learn of it a step later
    assert towers(_runs_until_it_is_stopped, str(folder), count=count) == [(step, name_of(step))] * count
    assert [path.name for path in folder.glob(".[es]*")] == [".ended"]


def test_a_request_waits_for_a_run_that_is_resumed(folder: pathlib.Path) -> None:
    manager = mirrored.CheckpointManager(mirrored.OneDeviceStrategy(), folder, {"progress": {}})
    (folder / STOP).write_text("enough")
    for _ in range(10):
        manager.step()  # there is nobody to take the exception
    assert (folder / STOP).exists()


def _evaluates(strategy: mirrored.Strategy, folder: str) -> Any:
    return found(folder, strategy=strategy, exporters=[Exporter("best", "loss")], timeout_seconds=1.0)


def test_several_towers_evaluate_the_same(folder: pathlib.Path) -> None:
    losses(folder, [3.0, 1.0])
    assert towers(_evaluates, str(folder)) == [[(1, 3.0), (2, 1.0)]] * 2
    assert restored_step(folder) == 2


def _differing(strategy: mirrored.Strategy, folder: str, value: Any) -> None:
    values = 0.5 if strategy.is_chief else value
    evaluator(folder, strategy=strategy, evaluate=lambda: {"loss": values}, timeout_seconds=1.0).run()


def test_metrics_that_differ_between_towers(folder: pathlib.Path) -> None:
    losses(folder, [3.0])
    words = (
        "the result of the evaluation, without strategy.reduce, is \"[('loss', 0.5)]\" on tower 0, "
        "but \"[('loss', 0.25)]\" on tower 1"
    )
    all_raise(mirrored.DisagreementError, re.escape(words), _differing, str(folder), 0.25)
    words = "evaluates step 1 on tower 1: the evaluation returned None as 'loss', but must return numbers"
    all_raise(TypeError, words, _differing, str(folder), None)


@fast
def test_a_damaged_checkpoint_is_left_out(folder: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    losses(folder, [3.0, 1.0])
    with open(folder / name_of(1) / "tensors.safetensors", "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    with caplog.at_level(logging.WARNING, "mirrored"):
        assert found(folder) == [(2, 1.0)]
    assert "it is damaged; it is not evaluated" in caplog.text


MISTAKES: dict[str, tuple[type[Exception], str, Callable[[], dict[str, Any]]]] = {
    "another model": (
        mirrored.CheckpointError,
        "does not fit the objects of this program; nothing was changed: model: 1.weight is in the checkpoint only",
        lambda: {"model": nn.Sequential(nn.Linear(1, 1, bias=False))},
    ),
    "no such metric": (
        ValueError,
        "the metric 'los' is asked for, but the evaluation returned only loss, step, sha256",
        lambda: {"stop": EarlyStopping("los", 10)},
    ),
    "no such metric to export": (ValueError, "the metric 'los'", lambda: {"exporters": [Exporter("best", "los")]}),
    "nothing returned": (
        TypeError,
        r"the evaluation returned None as '', but must return numbers by names, not \['step', 'sha256'\]",
        lambda: {"evaluate": lambda: None},
    ),
    "a name of the table's own": (TypeError, "1 as 'step'", lambda: {"evaluate": lambda: {"step": 1}}),
    "a name that is no text": (TypeError, "1.0 as 1", lambda: {"evaluate": lambda: {1: 1.0}}),
    **{
        f"a metric {value!r}": (
            TypeError,
            "the evaluation returned .* as 'loss', but must return numbers",
            lambda value=value: {"evaluate": lambda: {"loss": value}},
        )
        for value in ("high", None, torch.ones(2), 1j)
    },
    **{
        f"an exporter {names}": (
            ValueError,
            words,
            lambda names=names: {"exporters": [Exporter(name, "loss") for name in names]},
        )
        for names, words in (
            (("../x",), "must consist of letters, digits"),
            (("latest",), "and not be 'latest'"),
            *(((name,), "choose another") for name in ("step-00000001", "evaluation", "held", "metrics.jsonl")),
            (("best", "best"), "an exporter's name is 'best', which is taken"),
        )
    },
    "no folder": (ValueError, "folder is '', but must be that of the run's CheckpointManager", lambda: {"folder": ""}),
    "a path as name": (ValueError, "must consist of letters, digits", lambda: {"name": "../x"}),
}


@fast
@pytest.mark.row(53)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_say_what_to_do(folder: pathlib.Path, mistake: str) -> None:
    kind, words, settings = MISTAKES[mistake]
    losses(folder, [3.0])
    with pytest.raises(kind, match=words):
        evaluator(**{"folder": folder, **settings()}).run()
