"""A strategy knows its reducer by its interface alone: that of torch's ``DistributedDataParallel`` works, too."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import mirrored
from mirrored.strategy import engine
from tests.support.jobs import launch, make_data, make_mlp, parameters_of, text_of
from towers import MirrorError
from towers.gradients.averager import GradientAverager
from towers.gradients.reducer import GradientReducer
from towers.system.tensors import Named


class TorchReducer(GradientReducer):
    """Averages gradients with ``torch.distributed.Reducer``: one backward in each run, of all parameters."""

    def __init__(self, *_: object, **__: object) -> None:
        self._tensors: list[Tensor] = []
        self._reducer: Any = None
        self._accumulates = False
        self._numbers: dict[Tensor, int] = {}  # of the average that a parameter took part in last
        self._number = 0
        self._open = False

    def add(self, parameters: Sequence[Named]) -> None:
        self._tensors += [named.tensor for named in parameters]
        for tensor in self._tensors:
            tensor.register_post_accumulate_grad_hook(self._arrive)
        everything, sizes = [list(range(len(self._tensors)))], [2**30]
        self._reducer = dist.Reducer(self._tensors, everything, sizes, dist.group.WORLD, gradient_as_bucket_view=True)
        self.refresh()

    def refresh(self) -> None:
        self._open = False
        if self._reducer is not None and not self._accumulates:
            self._reducer._rebuild_buckets()
            self._reducer.prepare_for_backward([])

    def _arrive(self, parameter: Tensor) -> None:
        if not self._accumulates:
            self._number += not self._open
            self._open = True
            self._numbers[parameter] = self._number

    @contextlib.contextmanager
    def accumulating(self) -> Iterator[None]:
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    @property
    def averaged(self) -> int:
        return self._number

    def averaged_since(self, number: int, parameters: Iterable[Tensor]) -> bool:
        return any(self._numbers.get(parameter, 0) > number for parameter in parameters)

    @property
    def in_backward(self) -> bool:
        return False

    def unsynced(self) -> dict[int, str]:
        return {}

    def check_paired(self) -> None:
        """DDP does not compare backwards."""

    def break_off_backward(self, error: BaseException) -> None:
        """The other towers notice when this process has ended."""

    def reduces_densely(self, parameter: Tensor) -> bool:
        return True

    def digest_of_backwards(self) -> int:
        return self._number


def trained(reducer: type[GradientReducer]) -> list[Tensor]:
    """The parameters after three steps, with shares of 4 and 4, or 3, 3 and 2 examples."""
    with mock.patch.object(engine, "GradientAverager", reducer):
        strategy = mirrored.MirroredStrategy(seed=0)
    with strategy.scope():
        model = make_mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train = strategy.distribute_dataset(make_data(24), global_batch_size=8)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none")).backward()
        optimizer.step()

    for batch in train:
        strategy.run(step, args=batch)
    assert type(strategy.engine.averager) is reducer
    strategy.check_mirrored()
    return [parameter.clone() for parameter in parameters_of(model)]


@pytest.mark.parametrize("count", [2, pytest.param(3, marks=pytest.mark.extended)])
def test_training_by_torchs_reducer_is_that_of_ours(count: int) -> None:
    ours_and_theirs = (launch(trained, reducer, count=count) for reducer in (GradientAverager, TorchReducer))
    for ours, theirs in zip(*ours_and_theirs, strict=True):
        assert all(torch.allclose(a, b, rtol=1e-12, atol=0) for a, b in zip(ours, theirs, strict=True))


def unaveraged() -> str:
    """What a step on a tower's own gradients raises with torch's reducer."""
    with mock.patch.object(engine, "GradientAverager", TorchReducer):
        strategy = mirrored.MirroredStrategy(seed=0)
    with strategy.scope():
        model = make_mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    return text_of(MirrorError, strategy.run, step)


def test_the_guard_asks_it_what_is_averaged() -> None:
    for text in launch(unaveraged):
        assert "uses gradients that no backward() has averaged over the towers" in text
