"""A mean loss behind BatchNorm over the global batch. Right: 24 examples. Wrong: 27, whose last share is uneven."""

import sys

import torch
from torch import nn

import mirrored

EXAMPLES = int(sys.argv[1])
strategy = mirrored.MirroredStrategy()
with strategy.scope(sync_batch_norm=True):
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(EXAMPLES, 5), torch.randn(EXAMPLES, 8))
train = strategy.distribute_dataset(data, 8, shuffle=True)


def train_step(x, y):
    optimizer.zero_grad()
    (model(x) * y).mean().backward()
    optimizer.step()


for _ in range(3):
    for batch in train:
        strategy.run(train_step, args=batch)
