"""Steps that many tests train by, and the comparison of towers with one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mirrored
from tests.support.jobs import towers


def local_share(strategy: mirrored.Strategy, *tensors: Tensor) -> list[Tensor]:
    """This tower's share of each tensor, cut as a global batch is."""
    return [t.tensor_split(strategy.num_replicas_in_sync)[strategy.topology.index] for t in tensors]


Step = Callable[[Tensor, Tensor], Tensor]


def averaging_step(model: Callable[..., Tensor], optimizer: torch.optim.Optimizer) -> Step:
    """A step ``(x, y)`` as most scripts have it: it returns this tower's share of the mean loss."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none"))
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def gradients_of(model: nn.Module) -> list[Tensor]:
    """Copies of the gradients of all parameters that have one."""
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def equal_one_device(fn: Callable[..., Any], *args: Any, tolerance: float = 1e-12) -> list[Any]:
    """What ``fn(strategy, *args)`` gives on each of two towers: the same as on one device."""
    expected, results = fn(mirrored.OneDeviceStrategy(), *args), towers(fn, *args)
    for result in results:
        torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
    return results
