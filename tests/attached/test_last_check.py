"""Drift after the last check is found when towers end, and when a checkpoint is saved."""

from __future__ import annotations

import pathlib
import re

import pytest
import torch

import mirrored
from tests.support.jobs import ROOT, all_raise, make_data, make_mlp
from tests.support.programs import run_command
from tests.support.steps import averaging_step

DRIFTS = str(ROOT / "tests" / "programs" / "drifts.py")


@pytest.mark.extended
@pytest.mark.parametrize("starter", [["mirrored", "run"], ["torchrun", "--standalone"]])
def test_towers_that_differ_when_they_end_end_with_an_error(starter: list[str]) -> None:
    towers = ["--towers", "2"] if "mirrored" in starter else ["--nproc-per-node", "2"]
    job = run_command([*starter, *towers, DRIFTS, "drifts"], env={"CUDA_VISIBLE_DEVICES": ""})
    assert job.returncode == 1
    assert "done" in job.stdout
    words = r"MirrorError: parameter Linear.bias is no longer the same on all towers: tower 0 differs from tower 1"
    assert re.search(words, job.stderr)
    assert "This is how it was when the towers ended, after step 3" in job.stderr


@pytest.mark.extended
def test_what_a_tower_has_printed_is_seen_though_it_is_killed_at_its_end(tmp_path: pathlib.Path) -> None:
    job = run_command(["mirrored", "run", "--towers", "2", DRIFTS, "drifts", str(tmp_path / "has left")], code=1)
    assert "MirrorError" in job.stderr
    assert job.stdout == "done\n"


@pytest.mark.extended
@pytest.mark.parametrize(("kind", "code"), [("equal", 0), ("unchecked", 0), ("drops", 0), ("fails", 3)])
def test_towers_that_end_otherwise_are_left_alone(kind: str, code: int) -> None:
    job = run_command(["mirrored", "run", "--towers", "2", DRIFTS, kind], env={"CUDA_VISIBLE_DEVICES": ""})
    assert job.returncode == code
    assert "MirrorError" not in job.stderr
    assert ("done" in job.stdout) == (kind != "fails")


def save_after_drift(strategy: mirrored.Strategy, folder: str, of_state: bool) -> None:
    with strategy.scope():
        model = make_mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    manager = mirrored.CheckpointManager(strategy, folder, {"model": model, "optimizer": optimizer})
    step = averaging_step(model, optimizer)
    for _ in range(3):
        strategy.run(step, args=make_data(4))
        manager.step()
    manager.save()
    if strategy.topology.index == 1:
        with torch.no_grad():
            changed = optimizer.state[model[2].bias]["momentum_buffer"] if of_state else model[2].bias
            changed[0] += 1e-9
    manager.step()
    manager.save()


@pytest.mark.parametrize("of_state", [False, True])
def test_a_checkpoint_of_towers_that_differ_is_not_written(tmp_path: pathlib.Path, of_state: bool) -> None:
    words = f"{'optimizer state momentum_buffer of' if of_state else 'parameter'} Sequential.2.bias"
    all_raise(mirrored.MirrorError, words, save_after_drift, str(tmp_path), of_state)
    assert sorted(path.name for path in tmp_path.glob("step-*")) == ["step-00000003"]
