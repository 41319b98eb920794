"""The ordinary loop and its optimizers; nothing here knows of mirrored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import models
import torch
from torch.optim import Optimizer

Step = Callable[[], object]
MakeOptimizer = Callable[[Any], Optimizer]
Forward = Callable[[torch.Tensor], torch.Tensor]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=1e-4),
    "adam-fused": lambda parameters: torch.optim.Adam(parameters, lr=1e-4, fused=True),
}
"""Name and optimizer; SGD has momentum, Adam comes as torch builds it by default and with its fused kernel."""


def step(
    forward: Forward,
    parameters: Any,
    x: torch.Tensor,
    y: torch.Tensor,
    make_optimizer: MakeOptimizer = OPTIMIZERS["sgd"],
) -> Step:
    """An ordinary loop; where ``forward`` is a model wrapped in DDP it is DDP's."""
    optimizer = make_optimizer(parameters)

    def train_step() -> None:
        optimizer.zero_grad()
        models.per_example_loss(forward(x), y).mean().backward()
        optimizer.step()

    return train_step
