"""``fit`` with sharded optimizers and in central storage: memory, files, and what is read and written in between."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest

from tests.keras import sharded
from tests.support.jobs import Settings, launch

WAYS: list[Settings] = [{"shard_optimizer": True}, {"central": True}]
HOSTS = [({"shard_optimizer": True}, ""), ({"central": True}, ""), ({"shard_optimizer": True}, "ab")]


@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_the_state_is_once_on_all_towers_together(settings: Settings) -> None:
    found = launch(sharded.memory, settings)
    (_, _, model), shards = found[0], sum(shards for _, shards, _ in found)
    assert shards == 2 * model  # Adam's two values of each parameter
    for own, each, _ in found:
        assert own < 100  # the learning rate and the number of steps
        assert each < 0.6 * shards


@pytest.mark.parametrize(("settings", "hosts"), HOSTS, ids=str)
def test_files_have_the_state_of_all_towers(tmp_path: pathlib.Path, settings: Settings, hosts: str) -> None:
    (tmp_path / "plain").mkdir()
    plain, _ = launch(sharded.saved, str(tmp_path / "plain"), {}, "")
    for found in launch(sharded.saved, str(tmp_path), settings, hosts):
        assert found.keys() == plain.keys()
        for name, expected in plain.items():
            for path, value in expected.items():
                np.testing.assert_allclose(found[name][path], value, rtol=0, atol=1e-6, err_msg=f"{name}: {path}")
    assert {"best.keras", "model.keras", "model.weights.h5"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.extended
@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_a_resumed_run_ends_with_the_same_bits(tmp_path: pathlib.Path, settings: Settings) -> None:
    expected = launch(sharded.resumed, "", settings)[0]
    for found in launch(sharded.resumed, str(tmp_path / "run"), settings):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.extended
@pytest.mark.parametrize("function", [sharded.averaged, sharded.constrained])
@pytest.mark.parametrize("settings", WAYS, ids=str)
def test_the_weights_of_mirrored_towers(settings: Settings, function: object) -> None:
    assert callable(function)
    expected = launch(function, {})[0]
    for found in launch(function, settings, count=3):
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=0, atol=1e-12)


def test_a_tower_reads_the_state_alone() -> None:
    (total, one_is_finite), (_, other_is_finite) = launch(sharded.one_tower_reads, {"shard_optimizer": True})
    assert total > 0
    assert one_is_finite
    assert other_is_finite


@pytest.mark.extended
@pytest.mark.parametrize("optimizer", ["Lamb", "Adafactor", "Muon"])
def test_optimizers_that_look_at_a_whole_parameter_are_refused(optimizer: str) -> None:
    for text in launch(sharded.error_of, optimizer):
        assert text.startswith(f"shard_optimizer=True cannot shard {optimizer}.step(): ")
