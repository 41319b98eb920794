"""Metrics that count updates or compute in ``forward``, with full, ragged and empty last shares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchmetrics
from torchmetrics.wrappers import MinMaxMetric, Running

import mirrored
from tests.support.jobs import towers

pytestmark = pytest.mark.extended

SIZES = (20, 21, 22, 23)
"""In batches of 4, the last batch has 4, 1, 2 and 3 examples."""


def made() -> dict[str, Any]:
    return {
        "sum": torchmetrics.RunningSum(window=2),
        "mean": torchmetrics.RunningMean(window=3),
        "squared": Running(torchmetrics.MeanSquaredError(), window=2),
        "lowest and highest": MinMaxMetric(torchmetrics.MeanSquaredError()),
    }


def values(strategy: mirrored.Strategy, size: int, calls: bool) -> dict[str, float]:
    """The metrics after an epoch of ``size`` examples, updated by ``update`` or by ``forward``."""
    metrics = {name: strategy.mirror(metric) for name, metric in made().items()}
    x = torch.arange(float(size))

    def step(x: torch.Tensor) -> None:
        for name, metric in metrics.items():
            arguments = (x,) if name in ("sum", "mean") else (x, x * x)
            (metric if calls else metric.update)(*arguments)

    for batch in strategy.distribute_dataset((x,), 4):
        strategy.run(step, args=batch)
    found = {name: metric.compute() for name, metric in metrics.items()}
    lowest = found.pop("lowest and highest")
    return {name: float(value) for name, value in {**found, **lowest}.items()}


def all_sizes(strategy: mirrored.Strategy, calls: bool) -> list[dict[str, float]]:
    return [values(strategy, size, calls) for size in SIZES]


@pytest.mark.parametrize("calls", [False, True])
def test_an_empty_share_is_an_update_of_nothing(calls: bool) -> None:
    (alone,) = towers(all_sizes, calls, count=1)
    assert alone[1]["sum"] == 16 + 17 + 18 + 19 + 20  # the last two batches of 21 examples
    for count in (2, 3):
        for several in towers(all_sizes, calls, count=count):
            for found, numbers in zip(several, alone, strict=True):
                assert found == pytest.approx(numbers)
