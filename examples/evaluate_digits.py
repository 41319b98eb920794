"""Train the digits, and evaluate each checkpoint beside the training, which stops when accuracy no longer rises.

In two terminals, in any order:

    python examples/evaluate_digits.py                trains; as digits.py it may be started in other ways, too
    mirrored evaluate examples/evaluate_digits.py     evaluates each new checkpoint, keeps the best, stops the training

or as the tasks "worker" and "evaluator" of a TF_CONFIG cluster.
"""

from __future__ import annotations

import argparse
import pathlib

import torch
import torch.nn.functional as F
from digits import Net, load_digits
from torch import Tensor

import mirrored
from mirrored.evaluation import EarlyStopping, Evaluator, Exporter, is_evaluator

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--devices", type=lambda text: text.split(","), help="one per tower, such as cpu:0,cpu:1")
parser.add_argument("--epochs", type=int, default=50, help="at most")
parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("results/evaluate_digits"))
arguments = parser.parse_args()

strategy = mirrored.MultiWorkerMirroredStrategy(devices=arguments.devices, seed=0)
train_set, test_set = load_digits()
train = strategy.distribute_dataset(train_set, 64, shuffle=True)
test = strategy.distribute_dataset(test_set, 256)
with strategy.scope():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def train_step(images: Tensor, labels: Tensor) -> None:
    optimizer.zero_grad()
    mirrored.compute_average_loss(F.cross_entropy(model(images), labels, reduction="none")).backward()
    optimizer.step()


def test_step(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = model(images)
    return F.cross_entropy(logits, labels, reduction="sum"), (logits.argmax(1) == labels).sum()


def evaluate() -> dict[str, float]:
    sums = [strategy.reduce("sum", strategy.run(test_step, args=batch)) for batch in test]
    loss, accuracy = (float(sum(column)) / len(test_set) for column in zip(*sums, strict=True))
    return {"loss": loss, "accuracy": accuracy}


if is_evaluator(strategy):
    rows = Evaluator(
        strategy,
        arguments.output,
        {"model": model},
        evaluate,
        exporters=[Exporter("best", "accuracy", higher_is_better=True)],
        stop=EarlyStopping("accuracy", max_steps=5 * len(train), higher_is_better=True),
    ).run()
    best = max(rows, key=lambda row: row["accuracy"])
    strategy.print(f"best test accuracy {best['accuracy']:.2%} after step {best['step']}; see {arguments.output}/best")
else:
    objects = {"model": model, "optimizer": optimizer, "train": train}
    checkpoints = mirrored.CheckpointManager(strategy, arguments.output, objects, every_steps=len(train))
    with checkpoints.resume():
        for epoch in train.epochs(arguments.epochs):
            for batch in train:
                strategy.run(train_step, args=batch)
                checkpoints.step()
            strategy.print(f"epoch {epoch + 1} of at most {arguments.epochs}")
    strategy.print(f"trained to step {checkpoints.steps}")
