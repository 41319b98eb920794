"""Wrong: BatchNorm takes the statistics of each tower's own examples."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import mirrored

EXAMPLES = int(sys.argv[1])
strategy = mirrored.MirroredStrategy()
with strategy.scope():
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(EXAMPLES, 5), torch.randint(0, 3, (EXAMPLES,)))
train = strategy.distribute_dataset(data, 8, shuffle=True)


def train_step(x, y):
    optimizer.zero_grad()
    loss = mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none"))
    loss.backward()
    optimizer.step()


for _ in range(3):
    for batch in train:
        strategy.run(train_step, args=batch)
