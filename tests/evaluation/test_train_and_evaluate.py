"""``train_and_evaluate`` trains and evaluates in turns on all towers; in a cluster with an evaluator it only trains."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import pytest
import torch
from torch import nn

import mirrored
from mirrored.checkpoint.manifest import name_of
from mirrored.evaluation import EarlyStopping, EvalSpec, TrainSpec, is_evaluator
from tests.support.jobs import all_raise, seeded, towers


def _train(strategy: mirrored.Strategy, folder: str, max_steps: int = 7, examples: int = 18, **settings: Any) -> Any:
    """Ragged batches of 8; an epoch has three. ``settings`` are those of EvalSpec."""
    with strategy.scope():
        model = seeded(lambda: nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.5)).double())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.randn(18, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    train = strategy.distribute_dataset(inputs[:examples], 8, shuffle=True)
    test = strategy.distribute_dataset((inputs, inputs.sum(1)), 5)
    modes = list[bool]()

    def train_step(x: torch.Tensor) -> None:
        modes.append(model.training)
        optimizer.zero_grad()
        mirrored.compute_average_loss((model[0](x)[:, 0] - x.sum(1)).square()).backward()
        optimizer.step()

    def evaluate() -> dict[str, Any]:
        errors = [strategy.run(lambda x, y: (model(x)[:, 0] - y).square().sum(), args=batch) for batch in test]
        return {"loss": strategy.reduce("sum", sum(errors)) / 18, "one": 1}

    settings = {"throttle_secs": 0.0, **settings}
    spec = EvalSpec(strategy, folder, {"model": model}, evaluate, **settings)
    rows = mirrored.train_and_evaluate(
        TrainSpec(train_step, train, max_steps, {"optimizer": optimizer}), spec, every_steps=2
    )
    return [(row["step"], row["loss"]) for row in rows], all(modes), len(modes)


def test_towers_train_and_evaluate_in_turns(tmp_path: pathlib.Path) -> None:
    """Where a checkpoint was saved, and at the end; the same on one tower and on two, and by a run that goes on."""
    [(one, trains, steps)] = towers(_train, str(tmp_path / "1"), count=1)
    assert (trains, steps, [step for step, _ in one]) == (True, 7, [2, 4, 6, 7])
    assert one[0][1] > one[-1][1]
    towers(_train, str(tmp_path / "2"), 3)
    for rows, _, steps in towers(_train, str(tmp_path / "2")):
        assert steps == 4
        assert [step for step, _ in rows] == [2, 3, 4, 6, 7]
        assert [loss for step, loss in rows if step != 3] == pytest.approx([loss for _, loss in one], rel=1e-12)
    again = towers(_train, str(tmp_path / "2"))
    assert [(len(rows), steps) for rows, _, steps in again] == [(5, 0)] * 2, "what is done is not done again"


def test_an_interrupted_evaluation_is_repeated(tmp_path: pathlib.Path) -> None:
    towers(_train, str(tmp_path), 4)
    table = tmp_path / "evaluation" / "metrics.jsonl"
    rows = table.read_text().splitlines(keepends=True)
    table.write_text("".join(rows[:-1]) + rows[-1][:9])  # as a kill in the evaluation of step 4 leaves it
    for found, _, steps in towers(_train, str(tmp_path)):
        assert ([step for step, _ in found], steps) == ([2, 4, 6, 7], 3)
    assert table.read_text().startswith("".join(rows))


def _settings(strategy: mirrored.Strategy, folder: str) -> Any:
    throttled, _, _ = _train(strategy, f"{folder}/throttled", throttle_secs=1e6)
    stopped, _, steps = _train(strategy, f"{folder}/stopped", stop=EarlyStopping("one", 4))
    return [step for step, _ in throttled], [step for step, _ in stopped], steps


def test_evaluations_are_throttled_and_stop_the_training(tmp_path: pathlib.Path) -> None:
    assert towers(_settings, str(tmp_path)) == [([2, 7], [2, 4, 6], 6)] * 2
    assert {path.name for path in (tmp_path / "stopped").glob(".[es]*")} == {".ended"}


def _as_worker(strategy: mirrored.Strategy, folder: str) -> Any:
    strategy.cluster_resolver.cluster_spec = lambda: {"worker": ["a:1"], "evaluator": ["b:1"]}  # type: ignore[method-assign]
    return _train(strategy, folder)


def test_beside_an_evaluator_the_others_only_train(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert towers(_as_worker, str(tmp_path)) == [([], True, 7)] * 2
    assert not (tmp_path / "evaluation").exists()
    assert (tmp_path / name_of(7)).is_dir()
    monkeypatch.setenv("MIRRORED_TASK", "evaluator")
    rows, _, steps = _train(mirrored.OneDeviceStrategy(), str(tmp_path), timeout_seconds=0.5)
    assert ([step for step, _ in rows], steps) == ([6, 7], 0)
    assert len(json.loads((tmp_path / "evaluation" / "metrics.jsonl").read_text().splitlines()[0])) == 4


def test_a_strategy_that_does_not_read_tf_config_is_of_its_task(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = {"chief": ["a:1"], "evaluator": ["b:1"]}
    for kind in ("chief", "evaluator"):
        monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": kind, "index": 0}}))
        for make in (mirrored.MirroredStrategy, mirrored.OneDeviceStrategy):
            assert is_evaluator(make()) == (kind == "evaluator")
        rows, _, steps = _train(mirrored.OneDeviceStrategy(), str(tmp_path), timeout_seconds=0.5)
        assert ([step for step, _ in rows], steps) == {"chief": ([], 7), "evaluator": ([6, 7], 0)}[kind]


def test_training_has_a_step(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="max_steps is 0, but must be at least 1"):
        _train(mirrored.OneDeviceStrategy(), str(tmp_path), max_steps=0)


def test_data_without_a_batch(tmp_path: pathlib.Path) -> None:
    all_raise(ValueError, "the data of TrainSpec have no batch", _train, str(tmp_path), 7, 0)
