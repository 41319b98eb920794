"""Towers that train a Keras model hold the same, write one set of files, and stop together."""

from __future__ import annotations

import functools
import pathlib
import re
import tempfile
from typing import Any

import numpy as np
import pytest

import mirrored
from tests.keras import behaviours, stopped
from tests.support.jobs import ROOT, launch
from tests.support.programs import run_command


def assert_same(weights: list[Any], others: list[Any]) -> None:
    for one, other in zip(weights, others, strict=True):
        np.testing.assert_array_equal(one, other)


def test_moving_statistics_are_averaged_and_dropout_is_each_towers_own() -> None:
    one, other = launch(behaviours.own_batch_norm_and_dropout)
    assert_same(one["weights"], other["weights"])
    assert not np.array_equal(one["drawn"], other["drawn"])
    assert one["ways"] == other["ways"]
    # 8 batches of 5 (3 + 2), then 5 of 4 (2 + 2)
    assert one["ways"]["sum"] == 8 * (3 + 20) + 5 * (2 + 20)
    assert one["ways"]["mean"] == pytest.approx(8 * (3 * 3 + 20 * 2) / 5 + 5 * (2 * 2 + 20 * 2) / 4)
    assert one["ways"]["only_first_replica"] == 8 * 3 + 5 * 2


def test_files_and_the_progress_bar_are_the_chiefs(tmp_path: pathlib.Path) -> None:
    one, other = launch(behaviours.callbacks_and_files, str(tmp_path))
    assert "Epoch 2/2" in one["printed"]
    assert "val_loss" in one["printed"]
    assert "saving model to" in one["printed"]
    assert other["printed"] == ""
    assert {"best.keras", "1-5.weights.h5", "log.csv", "backup", "saved.keras", "saved.weights.h5"} <= set(one["files"])
    assert len(one["lines"]) == 3
    assert one["batches"] == other["batches"] == 3
    assert_same(one["weights"], other["weights"])
    assert (one["rows"], other["rows"]) == (2 * 2, 0)
    (tmp_path / "backup" / "latest.weights.h5").write_text("as of a writer that was killed")
    epochs, weights = launch(behaviours.restored, str(tmp_path))[1]
    assert epochs == [1, 2, 3]  # the last backup is of the second epoch
    assert all(np.isfinite(weight).all() for weight in weights)


@pytest.mark.parametrize("towers", [1, 2, 3])
def test_tensorboard_is_written_by_the_chief_alone(tmp_path: pathlib.Path, towers: int) -> None:
    for found in launch(behaviours.boards, str(tmp_path), count=towers):
        epochs, batches = [0, 1, 2], [5, 10, 15]
        assert found["validation"] == {"epoch_accuracy": epochs, "epoch_loss": epochs}
        assert found["train"].pop("epoch_learning_rate") == epochs
        assert found["train"] == found["validation"] | {"batch_accuracy": batches, "batch_loss": batches}
        assert found["histograms of train"] == 4
        assert re.match("ImportError: .*mirrored.keras.TensorBoard", found["error"]), found["error"]


@pytest.mark.extended
def test_compiled_eager_and_mixed_precision() -> None:
    first, second = launch(behaviours.settings_of_compile)
    for name, values in first.items():
        expected = first["small" if "small" in name else "plain"]
        for plain, mine, theirs in zip(expected, values, second[name], strict=True):
            np.testing.assert_array_equal(mine, theirs)
            np.testing.assert_allclose(mine, plain, rtol=0, atol=0.02 if "mixed" in name else 1e-5, err_msg=name)


def test_a_second_strategy_trains_as_the_first() -> None:
    for losses in launch(behaviours.strategies_one_after_the_other):
        assert losses[:2] == losses[2:]


METRICS = [name for name in behaviours.MISTAKES if name.startswith("metric_")]
OTHERS = [name for name in behaviours.MISTAKES if name not in METRICS]


@pytest.fixture(scope="module")
def errors() -> list[list[str]]:
    """What each tower says to mistakes, one after the other in one job."""
    return launch(behaviours.errors_of, OTHERS)


@pytest.mark.parametrize("name", OTHERS)
def test_mistakes_are_errors_on_all_towers(errors: list[list[str]], name: str) -> None:
    for texts in errors:
        text = texts[OTHERS.index(name)]
        assert re.match(behaviours.MISTAKES[name][1], text), text


@pytest.mark.parametrize("towers", [1, 2, 3])
def test_metrics_that_do_not_add_up_are_errors_of_several_towers_only(towers: int) -> None:
    for texts in launch(behaviours.errors_of, METRICS, count=towers):
        for name, text in zip(METRICS, texts, strict=True):
            assert re.match(behaviours.MISTAKES[name][1] if towers > 1 else "nothing$", text), (name, text)


@functools.cache
def whole_fit(kind: str, towers: int) -> Any:
    """What a fit is that nothing disturbs."""
    with tempfile.TemporaryDirectory() as folder:
        return launch(behaviours.fit_with_checkpoints, folder, kind, -1, count=towers)[-1]


# 7 is in the middle of an epoch, 8 its last batch; in 12 it is killed when the epoch is over.
@pytest.mark.extended
@pytest.mark.parametrize(
    ("kind", "killed_in", "towers"),
    [
        *((kind, killed_in, 2) for kind in ("arrays", "loader") for killed_in in (7, 8, 12)),
        ("arrays", 12, 1),
        ("loader", 8, 3),
    ],
)
def test_a_killed_fit_goes_on_to_the_same_weights(
    tmp_path: pathlib.Path, kind: str, killed_in: int, towers: int
) -> None:
    def fit(killed_in: int) -> Any:
        return launch(behaviours.fit_with_checkpoints, str(tmp_path), kind, killed_in, count=towers)[-1]

    whole = whole_fit(kind, towers)
    assert len(whole["history"]["val_accuracy"]) == len(whole["epochs"])
    with pytest.raises(mirrored.TowerFailedError, match="SIGKILL"):
        fit(killed_in)
    # The second time there is nothing left to do, whenever it was killed.
    for _ in range(2 if killed_in == 12 or towers == 3 else 1):
        resumed = fit(-1)
        assert resumed["epochs"] == whole["epochs"]
        assert resumed["history"] == whole["history"]
        assert_same(resumed["weights"], whole["weights"])


@pytest.mark.extended
def test_a_fit_goes_on_from_a_snapshot_in_memory(tmp_path: pathlib.Path) -> None:
    """Nothing is on the disk then."""
    script = str(ROOT / "tests" / "programs" / "keras_restarts.py")
    ends = []
    for name, variables in (("whole", {}), ("killed", {"KILLED": "6"})):
        (tmp_path / name).mkdir()
        words = ["mirrored", "run", "--towers", "2", "--restarts", "1", script, str(tmp_path / name)]
        ends.append(run_command(words, env=variables, code=0).stdout.splitlines())
    whole, killed = ends
    assert whole[0] == killed[0] == "goes on after batch 0"
    assert killed[1:] in [[f"goes on after batch {batch}", whole[1]] for batch in (5, 6)]  # 6 is being written
    assert whole[1].startswith("has ended after batch 14 ")


def test_an_evaluator_stops_fit(tmp_path: pathlib.Path) -> None:
    """It returns as after its last epoch, and the last batch is saved."""
    assert launch(stopped.fit_that_an_evaluator_stops, str(tmp_path)) == [[11, 2]] * 2
    assert (tmp_path / "step-00000011").is_dir()
    assert (tmp_path / ".ended").exists()


def test_a_loop_of_ones_own_goes_on_with_keras_optimizer(tmp_path: pathlib.Path) -> None:
    def train(folder: str, steps: int) -> list[Any]:
        return launch(behaviours.a_loop_of_ones_own, str(tmp_path / folder), steps)[1]

    whole = train("whole", 10)
    train("parts", 5)
    assert_same(train("parts", 10), whole)
