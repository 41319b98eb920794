"""The ordinary loop and its optimizers; nothing here knows of mirrored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import torch
from torch.optim import Optimizer

Step = Callable[[], object]
MakeOptimizer = Callable[[Any], Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
    "adam-fused": lambda parameters: torch.optim.Adam(parameters, lr=1e-4, fused=True),
}
"""Name and optimizer; SGD has momentum, Adam comes as torch builds it by default and with its fused kernel."""


def step(
    model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, make_optimizer: MakeOptimizer = OPTIMIZERS["sgd"]
) -> Step:
    """An ordinary loop; with ``model`` wrapped in DDP it is DDP's."""
    optimizer = make_optimizer(model.parameters())

    def train_step() -> None:
        optimizer.zero_grad()
        models.per_example_loss(model(x), y).mean().backward()
        optimizer.step()

    return train_step
