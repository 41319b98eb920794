"""A small training that uses all that a checkpoint has to hold, and a fault at a chosen place of it."""

from __future__ import annotations

import hashlib
import pathlib
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import mirrored
from tests.faults.faults import Fault, Injector, WatchedDisk

EXAMPLES, BATCH, EPOCHS = 74, 16, 3


class Interrupted(Exception):
    """The run was ended in the middle."""


class Noisy(Dataset[tuple[int, Tensor, int]]):
    """Examples with their numbers; a little noise on each, another in every epoch."""

    def __init__(self, injector: Injector) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(EXAMPLES, 5, generator=generator)
        self.labels = torch.randint(0, 3, (EXAMPLES,), generator=generator).tolist()
        self.injector = injector

    def __len__(self) -> int:
        return EXAMPLES

    def __getitem__(self, index: int) -> tuple[int, Tensor, int]:
        self.injector.at("data")
        return index, self.inputs[index] + 0.1 * torch.randn(5), self.labels[index]


def make_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))


def steps_of(epochs: int = EPOCHS) -> int:
    """How many steps a training has."""
    return epochs * -(-EXAMPLES // BATCH)


def train(
    strategy: mirrored.Strategy,
    folder: pathlib.Path | str,
    *,
    epochs: int = EPOCHS,
    stop: int | None = None,
    fault: Fault | None = None,
    deadline: float | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Train to the end; returns what this tower then has: "digest" of all state, "losses", examples "seen", "steps".

    Args:
        stop: raise Interrupted after so many steps.
        fault: what goes wrong.
        deadline: seconds that a collective may take from then on.
        settings: of the checkpoint manager.
    """
    injector = Injector(fault, strategy.topology.index, pathlib.Path(f"{folder}.fault"), deadline)
    with strategy.scope():
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    average = torch.optim.swa_utils.AveragedModel(model)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=steps_of(epochs))
    data = strategy.distribute_dataset(Noisy(injector), BATCH, shuffle=True)
    progress: dict[str, Any] = {"losses": [], "seen": hashlib.sha256().hexdigest(), "steps": 0}
    tracked = {"model": model, "optimizer": optimizer, "schedule": schedule, "data": data, "progress": progress}
    settings = {"every_steps": 4, "disk": WatchedDisk(injector), **settings}
    checkpoints = mirrored.CheckpointManager(strategy, folder, {**tracked, "average": average}, **settings)
    if fault is not None:
        injector.watch_optimizer(optimizer)
        injector.watch_all_reduce()
        injector.watch_saving(checkpoints, strategy.is_chief)

    def losses(x: Tensor, y: Tensor) -> Tensor:
        injector.at("forward")
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
        injector.step = checkpoints.steps
        for _ in data.epochs(epochs):
            for index, x, y in data:
                progress["losses"] = [*progress["losses"][-20:], float(strategy.run(train_step, args=(x, y)))]
                # A chain: which examples were in which step, in which order.
                seen = strategy.gather(index).tolist()
                progress["seen"] = hashlib.sha256(f"{progress['seen']} {seen}".encode()).hexdigest()
                progress["steps"] += 1
                checkpoints.step()
                injector.step = checkpoints.steps
                if checkpoints.steps == stop:
                    raise Interrupted
    return {**progress, "restored": restored, "digest": digest(model, average, optimizer)}


def digest(model: nn.Module, average: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """One checksum over parameters, buffers, averages and the optimizer's state."""
    found = hashlib.sha256()
    for module in (model, average):
        for value in module.state_dict().values():
            found.update(value.cpu().numpy().tobytes())
    for state in optimizer.state_dict()["state"].values():
        for value in state.values():
            found.update(value.cpu().numpy().tobytes())
    return found.hexdigest()
