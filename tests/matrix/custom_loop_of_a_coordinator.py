"""A custom training loop with parameter servers: python custom_loop_of_a_coordinator.py STRATEGY FOLDER EXAMPLES."""

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
coordinator = mirrored.ClusterCoordinator(strategy)
train = strategy.distribute_dataset((images[:examples], labels[:examples]), 32, shuffle=True, seed=0)


def train_step(x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


values = [coordinator.schedule(train_step, args=batch) for _ in range(3) for batch in train]
coordinator.join()
losses = torch.stack(coordinator.fetch(values)).view(-1, 2).mean(1)
print("losses", json.dumps(losses.tolist()))
