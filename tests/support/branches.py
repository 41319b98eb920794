"""A model of which each tower uses another part."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import mirrored


class Branches(nn.Module):
    """Two branches, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.idle = (nn.Linear(2, 1, bias=False) for _ in range(3))

    def forward(self, x: Tensor, branch: str) -> Tensor:
        return getattr(self, branch)(x)


def use_one_branch_each(strategy: mirrored.Strategy) -> list[list[float] | None]:
    with strategy.scope():
        model = Branches()
    r = strategy.topology.index
    strategy.run(lambda: model(torch.tensor([[2.0, 4.0]]), ["left", "right"][r]).sum().backward())
    return [None if p.grad is None else p.grad.flatten().tolist() for p in model.parameters()]


def keep_models_on_one_tower(strategy: mirrored.Strategy) -> list[float]:
    """The chief keeps the model of each fold, the others drop theirs."""
    kept, found = [], []
    for width in (500, 300, 100):
        with strategy.scope():
            model = nn.Linear(width, 2, bias=False)
        strategy.run(lambda m: (m.weight * (strategy.topology.index + 1)).sum().backward(), args=(model,))
        found.append(float(model.weight.grad.max()))
        if strategy.is_chief:
            kept.append(model)
        del model
    return found
