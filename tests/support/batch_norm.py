"""Layers of batch norm on several towers, compared with the single device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

import mirrored


class WithReLU1d(nn.BatchNorm1d):
    """A layer with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return (3 + 2 * torch.randn(shape, generator=g, dtype=torch.float64)).to(dtype)


def own_share(strategy: mirrored.Strategy, whole: Tensor, sizes: list[int]) -> Tensor:
    return whole.split(sizes)[strategy.topology.index].clone()


def in_scope(strategy: mirrored.Strategy, *make: Callable[[], nn.Module]) -> list[nn.Module]:
    """Models made in one scope with sync_batch_norm, with parameters that are eighths, exact in every dtype."""
    with strategy.scope(sync_batch_norm=True):
        models = [function() for function in make]
    for model in models:
        for number, parameter in enumerate(p for p in model.parameters() if not is_lazy(p)):
            parameter.detach().copy_(random(*parameter.shape, seed=number).mul(8).round().div(8))
    return models


def fresh(**settings: Any) -> nn.Module:
    return nn.BatchNorm2d(3, dtype=torch.float64, **settings)
