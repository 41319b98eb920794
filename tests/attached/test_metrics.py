"""Evaluation counts every example once, on any number of towers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassConfusionMatrix

import mirrored
from tests.support.datasets import Streamed
from tests.support.jobs import all_raise, make_data, make_mlp, towers

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


def evaluated(strategy: mirrored.Strategy, kind: str) -> tuple[dict[str, Tensor], tuple[float, int, int]]:
    """What torchmetrics computes, and plain sums: of losses, of right answers, of examples."""
    with strategy.scope():
        model = make_mlp()
        if kind == "loader":  # as some keep them: inside the model
            model.metrics = torch.nn.ModuleDict(metrics())
    examples = TensorDataset(*make_data(EXAMPLES))
    args: dict[str, Any] = {"map": (examples, BATCH), "stream": (Streamed(examples), BATCH)}
    test = strategy.distribute_dataset(*args.get(kind, [DataLoader(examples, batch_size=BATCH)]))
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


class Kept(torchmetrics.Metric):
    """States of every kind: lists kept apart, with a function of its own, concatenated; sums; one of each tower."""

    full_state_update = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("boxes", default=[], dist_reduce_fx=None)
        self.add_state("scores", default=[], dist_reduce_fx=None)
        self.add_state("longest", default=[], dist_reduce_fx=lambda states: [max(states, key=len)])
        self.add_state("all", default=[], dist_reduce_fx="cat")
        self.add_state("total", default=torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")
        self.add_state("norm", default=torch.zeros(2), dist_reduce_fx=lambda states: states.square().sum(0).sqrt())
        self.add_state("each", default=torch.zeros(1), dist_reduce_fx=None)

    def update(self, boxes: Tensor) -> None:
        for box in boxes:  # as many lines as its number says
            self.boxes.append(box.repeat(int(box[0]), 1))
            self.scores.append(box[:1].repeat(int(box[0])))
            self.longest.append(box.repeat(int(box[0])))
        self.all.append(boxes[:, 0])
        self.total += len(boxes)
        self.norm = (self.norm.square() + boxes.square().sum(0)).sqrt()
        self.each += len(boxes)

    def compute(self) -> dict[str, Any]:
        longest = max(self.longest, key=len)
        return {
            "boxes": sorted(tuple(entry.shape) for entry in self.boxes),
            "pairs": sorted(
                (box[:, 0].tolist(), score.tolist()) for box, score in zip(self.boxes, self.scores, strict=True)
            ),
            "longest": longest.tolist(),
            "all": sorted((torch.cat(self.all) if isinstance(self.all, list) else self.all).tolist()),
            "total": int(self.total),
            "norm": self.norm.tolist(),
            "each": self.each.flatten().tolist(),
        }


class Total(Kept):
    def compute(self) -> Any:
        return self.total + len(self.boxes)


def kept_states(strategy: mirrored.Strategy) -> dict[str, Any]:
    metric = strategy.mirror(Kept())
    group = strategy.mirror(torchmetrics.MetricCollection([Total(), MeanOfAll()]))
    boxes = torch.stack([torch.arange(4.0) % 3, torch.arange(4.0)], 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for (own,) in strategy.distribute_dataset(TensorDataset(boxes), 3):
            strategy.run(metric.update, args=(own,))
            strategy.run(group.update, args=(own,))
        first = metric.compute()
        assert len(metric.boxes) == len(metric.scores) == int(metric.total), "its own again after compute()"
        metric.reset()
        for (own,) in strategy.distribute_dataset(TensorDataset(boxes[:1]), 3):
            value = strategy.run(metric, args=(own,))  # forward
            assert int(value["total"]) == 1 if len(own) else value.isnan()
        again = metric.compute()
        grouped = {name: float(value) for name, value in group.compute().items()}
    return {"first": first, "again": again, "group": grouped}


class MeanOfAll(Kept):
    def compute(self) -> Any:
        joined = torch.cat(self.all) if isinstance(self.all, list) else self.all
        return joined.mean()


def test_states_of_every_kind_where_shares_are_empty() -> None:
    [alone] = towers(kept_states, count=1)
    assert alone["first"]["boxes"] == [(0, 2), (0, 2), (1, 2), (2, 2)]
    for count in (2, 4):
        for found in towers(kept_states, count=count):
            for name in ("first", "again"):
                each = found[name].pop("each")
                assert len(each) == count
                assert sum(each) == found[name]["total"]
                expected = {key: value for key, value in alone[name].items() if key != "each"}
                assert found[name].pop("norm") == pytest.approx(expected.pop("norm"))
                assert found[name] == expected
            assert found["group"] == pytest.approx(alone["group"])


def texts(strategy: mirrored.Strategy, stand_in: bool) -> float:
    from torchmetrics.text import WordErrorRate

    metric = strategy.mirror(WordErrorRate())
    said = [("a b", "a c"), ("d", "d")]
    for guesses, truth in strategy.distribute_dataset(said, 2, stand_in=stand_in):
        strategy.run(lambda g=guesses, t=truth: metric.update(list(g), list(t)))
    return float(metric.compute())


@pytest.mark.parametrize("stand_in", [False, True])
def test_metrics_of_texts(stand_in: bool) -> None:
    assert towers(texts, stand_in, count=3) == pytest.approx([1 / 3] * 3)


def other_order(strategy: mirrored.Strategy) -> None:
    metrics = strategy.mirror(torch.nn.ModuleDict({"a": torchmetrics.MeanMetric(), "b": torchmetrics.MeanMetric()}))
    for metric in metrics.values():
        metric.update(torch.ones(3))
    for name in ("a", "b") if strategy.is_chief else ("b", "a"):
        metrics[name].compute()


def test_metrics_that_are_computed_in_another_order_are_named() -> None:
    all_raise(mirrored.DisagreementError, "compute.. of the metric MeanMetric b.*MeanMetric a", other_order)
