"""Evaluation counts every example once, on any number of towers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from jobs import make_data, make_mlp, towers
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassConfusionMatrix

import mirrored

EXAMPLES, BATCH = 66, 32
"""The last batch has 2 examples, fewer than there are towers in most of these tests."""


def metrics(reference: bool = False) -> dict[str, Any]:
    """Sums, means, counts by class, and one that keeps all examples (the area under the curve)."""
    single = {"sync_on_compute": False} if reference else {}
    return {
        "accuracy": MulticlassAccuracy(3, average="micro", **single),
        "by class": MulticlassAccuracy(3, average="none", **single),
        "confusion": MulticlassConfusionMatrix(3, **single),
        "area": MulticlassAUROC(3, **single),
        "mean loss": torchmetrics.MeanMetric(**single),
        "squared": torchmetrics.MeanSquaredError(**single),
        "largest": torchmetrics.MaxMetric(**single),
    }


def update(found: dict[str, Any], output: Tensor, y: Tensor) -> None:
    losses = F.cross_entropy(output, y, reduction="none")
    probabilities = output.softmax(1)
    for name in ("accuracy", "by class", "confusion", "area"):
        found[name].update(probabilities, y)
    found["mean loss"].update(losses)
    found["squared"].update(probabilities[:, 0].contiguous(), (y == 0).double())
    found["largest"].update(losses)


def expected() -> dict[str, Tensor]:
    """On one device, all examples at once."""
    found, (x, y) = metrics(reference=True), make_data(EXAMPLES)
    with torch.no_grad():
        update(found, make_mlp()(x), y)
    return {name: metric.compute() for name, metric in found.items()}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(TensorDataset(*make_data(EXAMPLES)))


def evaluated(strategy: mirrored.Strategy, kind: str) -> tuple[dict[str, Tensor], tuple[float, int, int]]:
    """What torchmetrics computes, and plain sums: of losses, of right answers, of examples."""
    with strategy.scope():
        model = make_mlp()
        if kind == "loader":  # as some keep them: inside the model
            model.metrics = torch.nn.ModuleDict(metrics())
    data: Any = {"map": TensorDataset(*make_data(EXAMPLES)), "stream": Stream()}.get(kind)
    if kind == "loader":
        test = strategy.distribute_dataset(DataLoader(TensorDataset(*make_data(EXAMPLES)), batch_size=BATCH))
    else:
        test = strategy.distribute_dataset(data, BATCH)
    found: Any = model.metrics if kind == "loader" else strategy.mirror(torch.nn.ModuleDict(metrics()))
    sums: Any = [0.0, 0, 0]

    @torch.no_grad()
    def test_step(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, int]:
        output = model[:3](x)
        update(found, output, y)
        return F.cross_entropy(output, y, reduction="sum"), (output.argmax(1) == y).sum(), len(y)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchmetrics says that a share is empty
        for batch in test:
            results = strategy.reduce("sum", strategy.run(test_step, args=batch))
            sums = [a + b for a, b in zip(sums, results, strict=True)]
        computed = {name: metric.compute() for name, metric in found.items()}
    return computed, (float(sums[0]), int(sums[1]), int(sums[2]))


@pytest.mark.parametrize(("count", "kind"), [(1, "map"), (2, "stream"), (3, "map"), (5, "map"), (5, "loader")])
def test_every_example_counts_once(count: int, kind: str) -> None:
    wanted, (x, y) = expected(), make_data(EXAMPLES)
    output = make_mlp()(x).detach()
    for computed, (loss, correct, examples) in towers(evaluated, kind, count=count):
        assert examples == EXAMPLES
        assert correct == int((output.argmax(1) == y).sum())
        assert loss == pytest.approx(float(F.cross_entropy(output, y, reduction="sum")), rel=1e-12)
        for name, value in wanted.items():
            torch.testing.assert_close(computed[name], value, rtol=1e-6, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
        assert torch.equal(computed["confusion"], wanted["confusion"])
        assert torch.equal(computed["area"], wanted["area"])


def collected(strategy: mirrored.Strategy) -> dict[str, Tensor]:
    """A collection, whose metrics share states once they have seen the same; used again, and copied."""
    kinds = {"low": MulticlassAccuracy(3, average="micro"), "macro": MulticlassAccuracy(3), "area": MulticlassAUROC(3)}
    first = strategy.mirror(torchmetrics.MetricCollection(kinds))
    copied = strategy.mirror(first.clone())
    small = strategy.distribute_dataset(TensorDataset(*make_data(2)), 2)
    test = strategy.distribute_dataset(TensorDataset(*make_data(EXAMPLES)), BATCH)
    model = make_mlp()
    with torch.no_grad():
        for x, y in small:  # leaves most towers out
            first.update(model(x).softmax(1), y)
        first.compute()
        first.reset()
        for x, y in test:
            first.update(model(x).softmax(1), y)
            copied.update(model(x).softmax(1), y)
    computed = first.compute()
    for name, value in copied.compute().items():
        assert torch.equal(value, computed[name])
    return computed


def test_metric_collections() -> None:
    x, y = make_data(EXAMPLES)
    output = make_mlp()(x).softmax(1).detach()
    for found in towers(collected, count=3):
        torch.testing.assert_close(found["macro"], MulticlassAccuracy(3, sync_on_compute=False)(output, y))
        torch.testing.assert_close(found["area"], MulticlassAUROC(3, sync_on_compute=False)(output, y))
        assert found["low"] == (output.argmax(1) == y).double().mean().float()
