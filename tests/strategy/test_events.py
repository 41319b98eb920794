"""The moments of a training, of which any number of listeners are told."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from torch import nn

import mirrored
from tests.support.jobs import towers
from towers.health import status


def moments(strategy: mirrored.Strategy, folder: str) -> list[Any]:
    """Those of two training steps, the second of which fails before its optimizer steps."""
    with strategy.scope():
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = strategy.distribute_dataset(torch.ones(5, 2), 3)
    manager = mirrored.CheckpointManager(strategy, folder, {"model": model})
    came: list[Any] = []
    events = strategy.events
    events.loaded.append(lambda local, total: came.append(("loaded", local, total)))
    events.begin_run.append(lambda fn: came.append(("begin_run", fn.__name__)))
    events.phase.append(lambda phase: came.append(phase) if phase in (status.BACKWARD, status.AVERAGING) else None)
    events.before_step.append(lambda optimizer: came.append("before_step"))
    events.after_step.append(lambda optimizer: came.append("after_step"))
    events.end_run.append(lambda: came.append(("end_run", strategy.health.step)))
    events.end_run.append(lambda: came.append("the second listener"))
    events.failed.append(lambda error: came.append(("failed", str(error))))
    events.saved.append(lambda name: came.append(("saved", name)))

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        mirrored.compute_average_loss(model(x).mean(1)).backward()
        if strategy.health.step == 2:
            raise ArithmeticError("the second step")
        optimizer.step()

    batches = iter(data)
    strategy.run(step, args=(next(batches),))
    manager.step()
    manager.save()
    with pytest.raises(ArithmeticError):
        strategy.run(step, args=(next(batches),))
    return came


@pytest.mark.parametrize("count", [1, 2])
def test_listeners_are_told_of_each_moment_in_order(count: int, tmp_path: pathlib.Path) -> None:
    for tower, came in enumerate(towers(moments, str(tmp_path), count=count)):
        shares = [(3, 3), (2, 2)] if count == 1 else [(2 - tower, 3), (1, 2)]
        backward = [status.BACKWARD, status.AVERAGING] if count == 2 else []
        assert came == [
            *(("loaded", *shares[0]), ("begin_run", "step"), *backward),
            *(["before_step", "after_step"] if count == 2 else []),
            *(("end_run", 1), "the second listener", ("saved", "step-00000001")),
            *(("loaded", *shares[1]), ("begin_run", "step"), *backward, ("failed", "the second step")),
        ]
