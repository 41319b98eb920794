"""A custom training loop on the digits: python custom_loop.py STRATEGY FOLDER EXAMPLES."""

import json
import sys

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

import mirrored
from tests.matrix.strategies import strategy_of

strategy, examples = strategy_of(sys.argv[1]), int(sys.argv[3])
images, labels = (torch.as_tensor(array) for array in load_digits(return_X_y=True))
images = images.float() / 16

torch.manual_seed(0)
with strategy.scope():
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
train = strategy.distribute_dataset((images[:examples], labels[:examples]), 64, shuffle=True, seed=0)


def train_step(x, y):
    optimizer.zero_grad()
    loss = mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none"))
    loss.backward()
    optimizer.step()
    return loss.detach()


losses = []
for _ in range(3):
    for batch in train:
        losses.append(float(strategy.reduce("sum", strategy.run(train_step, args=batch))))
if strategy.is_chief:
    print("losses", json.dumps(losses))
