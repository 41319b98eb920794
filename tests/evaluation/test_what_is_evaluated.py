"""A row of the table is of the exported weights, whatever each tower holds, and on any number of towers."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import mirrored
from mirrored.evaluation import EvalSpec, Evaluator, Exporter, TrainSpec
from tests.support.jobs import seeded, towers

INPUTS = torch.randn(18, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def make_model() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).double())


def loss_of(model: nn.Module) -> torch.Tensor:
    return (model(INPUTS)[:, 0] - INPUTS.sum(1)).square().mean()


def train(strategy: mirrored.Strategy, folder: str, in_turns: bool = True) -> Any:
    """Trains with ragged batches, and returns the rows."""
    with strategy.scope():
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = strategy.distribute_dataset((INPUTS, INPUTS.sum(1)), 7)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> None:
        optimizer.zero_grad()
        mirrored.compute_average_loss((model(x)[:, 0] - y).square()).backward()
        optimizer.step()

    spec = spec_of(strategy, folder, model, throttle_secs=0.0 if in_turns else 1e6)
    rows = mirrored.train_and_evaluate(TrainSpec(train_step, data, 8, {"optimizer": optimizer}), spec, every_steps=4)
    return [(row["step"], row["loss"]) for row in rows]


def spec_of(strategy: mirrored.Strategy, folder: str, model: nn.Module, **options: Any) -> Evaluator:
    data = strategy.distribute_dataset((INPUTS, INPUTS.sum(1)), 5)

    def evaluate() -> dict[str, Any]:
        errors = [strategy.run(lambda x, y: (model(x)[:, 0] - y).square().sum(), args=batch) for batch in data]
        return {"loss": strategy.reduce("sum", sum(errors)) / 18}

    return EvalSpec(strategy, folder, {"model": model}, evaluate, exporters=[Exporter("newest")], **options)


def evaluate_again(strategy: mirrored.Strategy, folder: str, name: str) -> float:
    with strategy.scope():
        model = make_model()
    evaluator = spec_of(strategy, folder, model, name=name)
    evaluator.evaluate_one(pathlib.Path(folder) / "step-00000008")
    return float(evaluator.rows[-1]["loss"])


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"synchronize": mirrored.LocalSGD(3)}, marks=pytest.mark.extended),
        pytest.param({"synchronize": mirrored.DiLoCo(3)}, marks=pytest.mark.extended),
    ],
)
def test_what_is_exported_is_what_was_evaluated(options: dict[str, Any], tmp_path: pathlib.Path) -> None:
    rows, same = towers(train, str(tmp_path / "run"), settings=options)
    assert rows == same
    assert [step for step, _ in rows] == [4, 8]
    model = make_model()
    model.load_state_dict(load_file(tmp_path / "run" / "evaluation" / "newest" / "model.safetensors"))
    assert float(loss_of(model.eval())) == pytest.approx(rows[-1][1], rel=1e-12)
    for count in (1, 2, 3):
        again = towers(evaluate_again, str(tmp_path / "run"), f"on{count}", count=count)
        assert again == [pytest.approx(rows[-1][1], rel=1e-12)] * count


def test_evaluations_do_not_change_the_training(tmp_path: pathlib.Path) -> None:
    """Each tower continues with its own statistics: its share's, which tower 0's replaced while it was evaluated."""
    often = towers(train, str(tmp_path / "often"))
    seldom = towers(train, str(tmp_path / "seldom"), False)
    assert [rows[-1:] for rows in often] == [rows[-1:] for rows in seldom]
