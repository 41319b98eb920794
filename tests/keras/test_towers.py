"""Towers that train a Keras model hold the same, write one set of files, and stop together."""

from __future__ import annotations

import pathlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mirrored
from tests.keras import behaviours

pytestmark = pytest.mark.slow


def test_moving_statistics_are_averaged_and_dropout_is_each_towers_own() -> None:
    one, other = mirrored.launch(behaviours.own_batch_norm_and_dropout, devices=behaviours.TOWERS)
    for mine, theirs in zip(one["weights"], other["weights"], strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert not np.array_equal(one["drawn"], other["drawn"])
    assert one["ways"] == other["ways"]
    # 8 batches of 5 (3 + 2), then 5 of 4 (2 + 2)
    assert one["ways"]["sum"] == 8 * (3 + 20) + 5 * (2 + 20)
    assert one["ways"]["mean"] == pytest.approx(8 * (3 * 3 + 20 * 2) / 5 + 5 * (2 * 2 + 20 * 2) / 4)
    assert one["ways"]["only_first_replica"] == 8 * 3 + 5 * 2


def test_files_and_the_progress_bar_are_the_chiefs(tmp_path: pathlib.Path) -> None:
    one, other = mirrored.launch(behaviours.callbacks_and_files, (str(tmp_path),), devices=behaviours.TOWERS)
    assert "Epoch 2/2" in one["printed"]
    assert "val_loss" in one["printed"]
    assert "saving model to" in one["printed"]
    assert other["printed"] == ""
    assert {"best.keras", "1-5.weights.h5", "log.csv", "backup", "saved.keras", "saved.weights.h5"} <= set(one["files"])
    assert len(one["lines"]) == 3
    assert one["batches"] == other["batches"] == 3
    for mine, theirs in zip(one["weights"], other["weights"], strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert (one["rows"], other["rows"]) == (2 * 2, 0)
    (tmp_path / "backup" / "latest.weights.h5").write_text("as of a writer that was killed")
    epochs, weights = mirrored.launch(behaviours.restored, (str(tmp_path),), devices=behaviours.TOWERS)[1]
    assert epochs == [1, 2, 3]  # the last backup is of the second epoch
    assert all(np.isfinite(weight).all() for weight in weights)


@pytest.mark.parametrize("towers", [1, 2, 3])
def test_tensorboard_is_written_by_the_chief_alone(tmp_path: pathlib.Path, towers: int) -> None:
    for found in mirrored.launch(behaviours.boards, (str(tmp_path),), devices=[f"cpu:{i}" for i in range(towers)]):
        epochs, batches = [0, 1, 2], [5, 10, 15]
        assert found["validation"] == {"epoch_accuracy": epochs, "epoch_loss": epochs}
        assert found["train"].pop("epoch_learning_rate") == epochs
        assert found["train"] == found["validation"] | {"batch_accuracy": batches, "batch_loss": batches}
        assert found["histograms of train"] == 4
        assert "mirrored.keras.TensorBoard" in found["error"]


def test_compiled_eager_and_mixed_precision() -> None:
    first, second = mirrored.launch(behaviours.settings_of_compile, devices=behaviours.TOWERS)
    for name, values in first.items():
        for plain, mine, theirs in zip(first["plain"], values, second[name], strict=True):
            np.testing.assert_array_equal(mine, theirs)
            np.testing.assert_allclose(mine, plain, rtol=0, atol=0.02 if "mixed" in name else 1e-5, err_msg=name)


def test_a_second_strategy_trains_as_the_first() -> None:
    for losses in mirrored.launch(behaviours.strategies_one_after_the_other, devices=behaviours.TOWERS):
        assert losses[:2] == losses[2:]


MISTAKES = {
    behaviours.outside_of_the_scope: r"MirrorError: model.fit of a model that was made outside of strategy.scope\(\)",
    behaviours.inside_run: r"RuntimeError: model.fit was called inside strategy.run",
    behaviours.other_data_on_each_tower: r"DisagreementError: the first batch of an epoch is another one on tower 1",
    behaviours.metric_without_variables: r"TypeError: the metric 'counts' \(Counts\) has no variables",
    behaviours.metric_that_is_not_combined: r"TypeError: the variable 'newest/newest' .* has aggregation='none'",
    behaviours.metric_of_a_maximum: r"TypeError: the metric 'extreme' \(Extreme\) of several towers would be wrong",
    behaviours.metric_of_mean_maxima: r"TypeError: the metric 'extreme' \(Extreme\) of several towers would be wrong",
    behaviours.metric_of_the_last_value: r"TypeError: the metric 'extreme' .* of 2 examples .*strategy.gather\(y_pred",
    behaviours.metric_of_tower_0: r"TypeError: the metric variable 'extreme/value' .*strategy.gather\(y_pred",
    behaviours.metric_that_is_a_function: r"TypeError: the metric 'largest' \(MeanMetricWrapper\) of several",
    behaviours.gradients_of_its_own: r"MirrorError: SGD.step\(\) on tower \d on gradients that no backward",
    behaviours.checkpoints_of_a_generator: r"ValueError: mirrored.keras.Checkpoints cannot go on in the middle",
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_mistakes_are_errors_on_all_towers(mistake: Callable[[mirrored.Strategy], None]) -> None:
    for text in mirrored.launch(behaviours.error_of, (mistake,), devices=behaviours.TOWERS):
        assert re.match(MISTAKES[mistake], text), text


@pytest.mark.parametrize("towers", [1, 3])
def test_metrics_that_do_not_add_up_are_errors_of_several_towers_only(towers: int) -> None:
    mistakes = [mistake for mistake in MISTAKES if mistake.__name__.startswith("metric_")]
    for texts in mirrored.launch(behaviours.errors_of, (mistakes,), devices=[f"cpu:{i}" for i in range(towers)]):
        for mistake, text in zip(mistakes, texts, strict=True):
            assert re.match(MISTAKES[mistake] if towers > 1 else "nothing$", text), text


# 10 is in the middle of an epoch, 14 its last batch; in 28 it is killed when the epoch is over.
@pytest.mark.parametrize(
    ("kind", "killed_in", "towers"),
    [
        *((kind, killed_in, 2) for kind in ("arrays", "loader") for killed_in in (10, 14, 28)),
        ("arrays", 28, 1),
        ("loader", 14, 3),
    ],
)
def test_a_killed_fit_goes_on_to_the_same_weights(
    tmp_path: pathlib.Path, kind: str, killed_in: int, towers: int
) -> None:
    def fit(folder: str, killed_in: int) -> Any:
        arguments, devices = (str(tmp_path / folder), kind, killed_in), [f"cpu:{i}" for i in range(towers)]
        return mirrored.launch(behaviours.fit_with_checkpoints, arguments, devices=devices)[-1]

    whole = fit("whole", -1)
    assert len(whole["history"]["val_accuracy"]) == len(whole["epochs"])
    with pytest.raises(mirrored.TowerFailedError, match="SIGKILL"):
        fit("killed", killed_in)
    for _ in range(2):  # the second time there is nothing left to do
        resumed = fit("killed", -1)
        assert resumed["epochs"] == whole["epochs"]
        assert resumed["history"] == whole["history"]
        for mine, theirs in zip(resumed["weights"], whole["weights"], strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"virtual_towers": 4}, "model.fit cannot be cut into virtual towers"),
        (
            {"shard_optimizer": True},
            "model.fit with shard_optimizer=True: the steps of torch's optimizers are shared out",
        ),
    ],
    ids=str,
)
def test_what_fit_cannot_do(settings: dict[str, Any], words: str) -> None:
    for text in mirrored.launch(behaviours.error_with, (), settings, devices=behaviours.TOWERS):
        assert words in text


def test_a_loop_of_ones_own_goes_on_with_keras_optimizer(tmp_path: pathlib.Path) -> None:
    def train(folder: str, steps: int) -> list[Any]:
        return mirrored.launch(
            behaviours.a_loop_of_ones_own, (str(tmp_path / folder), steps), devices=behaviours.TOWERS
        )[1]

    whole = train("whole", 10)
    train("parts", 5)
    for mine, theirs in zip(train("parts", 10), whole, strict=True):
        np.testing.assert_array_equal(mine, theirs)
