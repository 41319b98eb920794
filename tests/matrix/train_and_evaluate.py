"""``train_and_evaluate`` on the digits: python train_and_evaluate.py STRATEGY FOLDER EXAMPLES."""

import json
import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import mirrored
from mirrored.evaluation import EvalSpec, TrainSpec
from tests.matrix.strategies import batches_per_step, strategy_of

strategy, batches, examples = strategy_of(sys.argv[1]), batches_per_step(sys.argv[1]), int(sys.argv[3])
images, labels = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
images = images.float() / 16

torch.manual_seed(0)
with strategy.scope():
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
train = strategy.distribute_dataset((images[:examples], labels[:examples]), 64 // batches, shuffle=True, seed=0)
test = strategy.distribute_dataset((images[examples:], labels[examples:]), 100)


def train_step(x, y):
    optimizer.zero_grad()
    mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none")).backward()
    optimizer.step()


def evaluate():
    sums = [strategy.run(lambda x, y: F.cross_entropy(model(x), y, reduction="sum"), args=batch) for batch in test]
    return {"loss": float(strategy.reduce("sum", sum(sums))) / len(images[examples:])}


rows = mirrored.train_and_evaluate(
    TrainSpec(train_step, train, 60 * batches, {"optimizer": optimizer}),
    EvalSpec(strategy, sys.argv[2], {"model": model}, evaluate, throttle_secs=0.0),
    every_steps=20 * batches,
    keep=4,
)
if rows and strategy.is_chief:
    print("losses", json.dumps([row["loss"] for row in rows]))
