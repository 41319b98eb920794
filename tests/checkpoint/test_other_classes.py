"""Optimizers and schedules of another class than the saved one, whose states look alike."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

import mirrored
from tests.support.jobs import text_of

OPTIMIZERS = ("Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
SCHEDULES: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 2},
    "MultiStepLR": {"milestones": [2]},
    "ExponentialLR": {"gamma": 0.5},
    "ConstantLR": {},
    "LinearLR": {},
    "CosineAnnealingLR": {"T_max": 4},
    "PolynomialLR": {},
}


def saved(folder: pathlib.Path, optimizer: str, schedule: str) -> mirrored.CheckpointManager:
    strategy = mirrored.OneDeviceStrategy()
    model = torch.nn.Linear(2, 1)
    chosen = getattr(torch.optim, optimizer)(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    chosen.step()
    objects = {
        "optimizer": chosen,
        "schedule": getattr(lr_scheduler, schedule)(chosen, **SCHEDULES[schedule]),
    }
    return mirrored.CheckpointManager(strategy, folder, objects, asynchronous=False)


@pytest.mark.row(46)
@pytest.mark.parametrize("before", OPTIMIZERS)
def test_another_optimizer_is_an_error(before: str, tmp_path: pathlib.Path) -> None:
    saved(tmp_path, before, "StepLR").save("best")
    for after in OPTIMIZERS:
        if after == before:
            saved(tmp_path, after, "StepLR").restore("best")
            continue
        words = f"optimizer: it is of class {after} here, and of class {before} in the checkpoint"
        assert words in text_of(mirrored.CheckpointError, saved(tmp_path, after, "StepLR").restore, "best")


@pytest.mark.parametrize("before", SCHEDULES)
def test_another_schedule_is_an_error(before: str, tmp_path: pathlib.Path) -> None:
    saved(tmp_path, "SGD", before).save("best")
    for after in SCHEDULES:
        if after == before:
            saved(tmp_path, "SGD", after).restore("best")
            continue
        words = f"schedule: it is of class {after} here, and of class {before} in the checkpoint"
        assert words in text_of(mirrored.CheckpointError, saved(tmp_path, "SGD", after).restore, "best")
