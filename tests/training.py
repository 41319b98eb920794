"""A small training that uses all that a checkpoint has to hold."""

from __future__ import annotations

import hashlib
import pathlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import mirrored
from mirrored.checkpoint.disk import Disk

EXAMPLES, BATCH, EPOCHS = 74, 16, 3
STEPS = EPOCHS * -(-EXAMPLES // BATCH)


class Noisy(Dataset[tuple[int, Tensor, int]]):
    """Examples with their numbers; a little noise on each, another in every epoch."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(EXAMPLES, 5, generator=generator)
        self.labels = torch.randint(0, 3, (EXAMPLES,), generator=generator).tolist()

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor, int]:
        return index, self.inputs[index] + 0.1 * torch.randn(5), self.labels[index]


class Interrupted(Exception):
    """The run was ended in the middle."""


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))


def train(
    strategy: mirrored.Strategy,
    folder: pathlib.Path | str,
    *,
    stop: int | None = None,
    disk: Disk | None = None,
    at_step: Callable[[int], None] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train to the end; returns what this tower then has.

    Args:
        stop: raise Interrupted after so many steps.
        at_step: is called with the number of the step that is about to begin.
        settings: of the checkpoint manager.
    """
    with strategy.scope():
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    average = torch.optim.swa_utils.AveragedModel(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=STEPS)
    data = strategy.distribute_dataset(Noisy(), BATCH, shuffle=True)
    progress: dict[str, Any] = {"losses": [], "seen": []}
    tracked = {"model": model, "optimizer": optimizer, "schedule": schedule, "data": data, "progress": progress}
    settings = {"every_steps": 4, **settings}
    checkpoints = mirrored.CheckpointManager(strategy, folder, {**tracked, "average": average}, disk=disk, **settings)

    def losses(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = strategy.backward(losses, x, y)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        average.update_parameters(model)
        return loss

    with checkpoints.resume() as restored:
        for _ in data.epochs(EPOCHS):
            for index, x, y in data:
                if at_step is not None:
                    at_step(checkpoints.steps)
                progress["losses"].append(float(strategy.run(train_step, args=(x, y))))
                progress["seen"].append(strategy.gather(index).tolist())
                checkpoints.step()
                if checkpoints.steps == stop:
                    raise Interrupted
    return {
        "steps": checkpoints.steps,
        "restored": restored,
        "seen": progress["seen"],
        "losses": progress["losses"],
        "digest": digest(model, average, optimizer),
    }


def digest(model: nn.Module, average: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """One checksum over parameters, buffers, averages and the optimizer's state."""
    found = hashlib.sha256()
    for module in (model, average):
        for value in module.state_dict().values():
            found.update(value.numpy().tobytes())
    for state in optimizer.state_dict()["state"].values():
        for value in state.values():
            found.update(value.numpy().tobytes())
    return found.hexdigest()
