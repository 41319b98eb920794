"""Wrong twice: a sum for a loss, and a learning rate that grows with the towers."""

import torch
import torch.nn.functional as F
from torch import nn

import mirrored

strategy = mirrored.MirroredStrategy()
with strategy.scope():
    model = nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * strategy.num_replicas_in_sync)
data = torch.utils.data.TensorDataset(torch.randn(24, 5), torch.randint(0, 3, (24,)))
train = strategy.distribute_dataset(data, 8)


def train_step(x, y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y, reduction="sum").backward()
    optimizer.step()


for batch in train:
    strategy.run(train_step, args=batch)
