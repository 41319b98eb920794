"""Variables are saved and restored, on as many towers and on others."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

import mirrored
from tests.support.jobs import text_of, towers

SAVED: dict[str, tuple[Any, ...]] = {
    "mirrored": (0.0, "on_write", "mean"),
    "sum": (torch.zeros((), dtype=torch.float64), "on_read", "sum"),
    "count": (0, "on_read", "sum"),
    "mean": (0.0, "on_read", "mean"),
    "equal": (torch.tensor(0.0, dtype=torch.float64), "on_read", "mean"),
    "first": (0.0, "on_read", "only_first_replica"),
}


def checkpoints(strategy: mirrored.Strategy, folder: str, save: bool) -> dict[str, Any]:
    """Each variable as it is read and as it is on this tower, saved by two towers or restored."""
    variables = {name: strategy.variable(*options) for name, options in SAVED.items()}
    without = {**variables, "without": strategy.variable(0.0, "on_read", name="without")}
    manager = mirrored.CheckpointManager(strategy, folder, without)

    def write() -> None:
        for name, v in without.items():
            if name == "equal":
                v.assign(0.1)  # which adding for three towers and dividing rounds
            else:
                v.assign_add(strategy.topology.index + (1 if name == "count" else 1.1))

    refused = ""
    if save:
        strategy.run(write)
        manager.save("saved", wait=True)
    elif strategy.num_replicas_in_sync == 2:
        manager.restore("saved")
    else:
        refused = text_of(mirrored.CheckpointError, manager.restore, "saved")
        mirrored.CheckpointManager(strategy, folder, variables).restore("saved")
    local = {name: strategy.run(v.item) for name, v in without.items() if name != "mirrored"}
    return {"read": {name: v.item() for name, v in variables.items()}, "local": local, "refused": refused}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[pathlib.Path, list[Any]]:
    """A folder, and what two towers have saved there."""
    folder = tmp_path_factory.mktemp("variables")
    return folder, towers(checkpoints, str(folder), True)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_restored_by_the_manager(saved: tuple[pathlib.Path, list[Any]], count: int) -> None:
    folder, before = saved
    after = towers(checkpoints, str(folder), False, count=count)
    assert [tower["read"] for tower in after] == [before[0]["read"]] * count
    assert before[0]["read"]["count"] == 3
    if count == 2:
        assert after == before
    else:
        words = f"different number of towers and has no aggregation, so it cannot be restored on {count}"
        assert all(words in tower["refused"] for tower in after)


def test_a_state_fits_both_synchronizations() -> None:
    strategy = mirrored.OneDeviceStrategy()
    written, read = strategy.variable(3.0), strategy.variable(1.0, "on_read", "sum")
    read.load_state_dict(written.state_dict())
    assert read.item() == 3.0
    written.load_state_dict(strategy.variable(5.0, "on_read", "mean").state_dict())
    assert written.item() == 5.0
    assert "shape (2,)" in text_of(ValueError, written.load_state_dict, {"value": torch.ones(2)})
