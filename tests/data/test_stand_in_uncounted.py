"""Normalisation, metrics and comparisons leave stand-ins out."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

import mirrored
from tests.support.batch_norm import WithReLU1d
from tests.support.jobs import assert_close, make_data, parameters_of, seeded, towers
from tests.support.steps import averaging_step
from tests.verification.template import Script


class Logits(nn.Module):
    """A model whose buffers follow the steps, the examples, or all towers' examples."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(5, 8))
        self.norm = nn.BatchNorm1d(4)
        self.cut = WithReLU1d(4)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cut(self.norm(self.first(x).view(-1, 4, 2))).reshape(len(x), -1))


def train_norms(strategy: mirrored.Strategy, synchronised: bool) -> dict[str, Any]:
    model = strategy.mirror(seeded(Logits).double(), sync_batch_norm=synchronised)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    average = torch.optim.swa_utils.AveragedModel(model)
    data = strategy.distribute_dataset(TensorDataset(*make_data(14)), 12, stand_in=True)

    def step(x: Tensor, y: Tensor) -> None:
        averaging_step(model, optimizer)(x, y)
        average.update_parameters(model)

    before = {}
    for batch in data:
        before = {name: value.clone() for name, value in model.named_buffers()}
        strategy.run(step, args=batch)
    return {
        "before": before,
        "after": {name: value.clone() for name, value in model.named_buffers()},
        "average": {name: value.clone() for name, value in average.module.named_buffers()},
        "parameters": parameters_of(model),
    }


def test_running_statistics_of_a_tower_do_not_see_a_stand_in() -> None:
    first, _, last = towers(train_norms, False, count=3)
    assert not torch.equal(last["before"]["norm.running_mean"], torch.zeros(4))
    for name in ("norm.running_mean", "norm.running_var"):
        assert torch.equal(last["after"][name], last["before"][name])
        assert torch.equal(last["average"][name], last["before"][name]), "what a copy took in the run"
    for name in first["after"]:
        if "parametrizations" in name:  # power iteration follows the steps
            assert torch.equal(last["after"][name], first["after"][name])
            assert not torch.equal(last["after"][name], last["before"][name])
    assert_close(last["parameters"], first["parameters"], 0)


def test_batch_norm_over_the_global_batch_leaves_stand_ins_out() -> None:
    [alone] = towers(train_norms, True, count=1)
    for result in towers(train_norms, True, count=3):
        assert_close(result["parameters"], alone["parameters"], 1e-12)
        for name, value in result["after"].items():
            torch.testing.assert_close(value, alone["after"][name], rtol=1e-12, atol=1e-12)


def penalised(strategy: mirrored.Strategy) -> list[Tensor]:
    """A gradient of a gradient through a synchronised layer."""
    layers = seeded(lambda: nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)))
    model = strategy.mirror(layers.double(), sync_batch_norm=True)
    [[x]] = list(strategy.distribute_dataset(TensorDataset(make_data(2)[0]), 2, stand_in=True))

    def step(x: Tensor) -> None:
        x = x.clone().requires_grad_()
        outputs = mirrored.drop_stand_in(model(x))
        [slope] = torch.autograd.grad(outputs.sum() * strategy.num_replicas_in_sync, x, create_graph=True)
        mirrored.compute_average_loss(slope.square().sum(1) / strategy.num_replicas_in_sync**2).backward()

    strategy.run(step, args=(x,))
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_double_backward_through_a_synchronised_layer() -> None:
    [alone] = towers(penalised, count=1)
    for gradients in towers(penalised, count=3):
        assert_close(gradients, alone, 1e-10)


def evaluated(strategy: mirrored.Strategy) -> dict[str, Any]:
    y = make_data(5)[1]
    guesses = F.one_hot((y + torch.arange(5) % 2) % 3, 3).double() * 0.7 + 0.1
    kinds: dict[str, Any] = {
        "accuracy": MulticlassAccuracy(3, average="micro"),
        "area": MulticlassAUROC(3),
        "mean": torchmetrics.MeanMetric(),
    }
    found = strategy.mirror(nn.ModuleDict(kinds))
    together = strategy.mirror(torchmetrics.MetricCollection([MulticlassAccuracy(3, average="micro")]))
    correct, examples, kept = 0, 0, []

    def step(p: Tensor, y: Tensor) -> tuple[Tensor, int]:
        assert len(p) > 0, "no tower has an empty batch"
        found["accuracy"].update(p, y)
        found["area"](p * 1, y * 1)  # forward, of what was made of the batch
        found["mean"].update(F.nll_loss(p, y, reduction="none"))
        together.update(p, y)
        p, y = mirrored.drop_stand_in(p, y)
        kept.append(strategy.gather(y))
        return (p.argmax(1) == y).sum(), len(y)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in strategy.distribute_dataset(TensorDataset(guesses, y), 3, stand_in=True):
            a, b = strategy.reduce("sum", strategy.run(step, args=batch))
            correct, examples = correct + int(a), examples + int(b)
        values = {name: float(metric.compute()) for name, metric in found.items()}
        values["together"] = float(together.compute()["MulticlassAccuracy"])
    return {"correct": correct, "examples": examples, "y": torch.cat(kept).tolist(), **values}


def test_metrics_and_counts_leave_stand_ins_out() -> None:
    [alone] = towers(evaluated, count=1)
    assert alone["examples"] == 5
    assert alone.pop("y") == [2, 0, 1, 0, 1]
    for result in towers(evaluated, count=4):
        assert result.pop("y") == [2, 0, 1, 0, 1]
        assert result == pytest.approx(alone, rel=1e-6)


SCRIPT = Script(
    strategy="mirrored.MirroredStrategy(seed=0)",
    examples=5,
    train="strategy.distribute_dataset(data, 4, stand_in=True)",
    begin="optimizer.zero_grad()\nx = (x + torch.randn_like(x)).view(len(x), -1)",
    epochs="1",
    end="""\
with torch.no_grad():
    for x, y in train:
        guess, y = mirrored.drop_stand_in(model(x).argmax(1), y)
        strategy.reduce("sum", (guess == y).sum())""",
)


def test_a_comparison_of_one_tower_and_two_counts_no_stand_in(tmp_path: Any) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.text())
    report = mirrored.verify(str(script), towers=2)
    assert report.equal, str(report)
