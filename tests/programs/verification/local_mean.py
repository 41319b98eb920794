"""Wrong: each tower takes the mean over its own examples, and the last batch of an epoch is ragged."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import mirrored

EXAMPLES = int(sys.argv[1]) if sys.argv[1:] else 83
strategy = mirrored.MirroredStrategy()
with strategy.scope():
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

data = torch.utils.data.TensorDataset(torch.randn(EXAMPLES, 5), torch.randint(0, 3, (EXAMPLES,)))
train = strategy.distribute_dataset(data, 8, shuffle=True)


def train_step(x, y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


for _ in range(3):
    for batch in train:
        strategy.run(train_step, args=batch)
