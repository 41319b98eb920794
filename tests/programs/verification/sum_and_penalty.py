"""Wrong: the loss is a sum over the examples; the penalty beside it is right as it is."""

import torch
import torch.nn.functional as F
from torch import nn

import mirrored

strategy = mirrored.MirroredStrategy()
with strategy.scope():
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(27, 5), torch.randint(0, 3, (27,)))
train = strategy.distribute_dataset(data, 8)


def train_step(x, y):
    optimizer.zero_grad()
    penalty = sum(p.square().sum() for p in model.parameters())
    loss = F.cross_entropy(model(x), y, reduction="none").sum() + 0.1 * penalty
    loss.backward()
    optimizer.step()


for _ in range(3):
    for batch in train:
        strategy.run(train_step, args=batch)
