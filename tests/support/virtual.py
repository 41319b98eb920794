"""Jobs with virtual towers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import mirrored
from tests.support.jobs import towers

V = 8


def virtual(fn: Callable[..., Any], *args: Any, count: int, **settings: Any) -> list[Any]:
    """``fn(strategy, *args)`` on ``count`` towers, with 8 virtual ones."""
    return towers(fn, *args, count=count, settings={"virtual_towers": V, **settings})


def digest(values: Iterable[Tensor | float]) -> str:
    found = hashlib.sha256()
    for value in values:
        found.update(torch.as_tensor(value).detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def one_digest(fn: Callable[..., Any], *args: Any, counts: Iterable[int] = (1, 2), **kwargs: Any) -> str:
    """The digest that ``fn(strategy, *args)`` returns on every tower of every number of towers."""
    found = {count: virtual(fn, *args, count=count, **kwargs) for count in counts}
    assert len({one for results in found.values() for one in results}) == 1, found
    return next(iter(found.values()))[0]


class CountsExamples(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.weight * x.squeeze(1)


def counting(strategy: mirrored.Strategy) -> None:
    model = strategy.mirror(CountsExamples())
    backward_each(strategy, model, TensorDataset(torch.ones(9, 1)), 9)


def backward_each(strategy: mirrored.Strategy, loss_fn: Callable[..., Tensor], dataset: Any, size: int) -> list[Tensor]:
    """``strategy.backward(loss_fn, *batch)`` in a run for each batch; the losses."""

    def step(*batch: Any) -> Tensor:
        return strategy.backward(loss_fn, *batch)

    batches = strategy.distribute_dataset(dataset, size)
    return [strategy.run(step, args=batch if isinstance(batch, (list, tuple)) else (batch,)) for batch in batches]
