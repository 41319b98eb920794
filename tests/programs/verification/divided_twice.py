"""Wrong: divided by the examples of this tower, and by the number of towers once more."""

import torch
import torch.nn.functional as F
from torch import nn

import mirrored

strategy = mirrored.MirroredStrategy()
with strategy.scope():
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

data = torch.utils.data.TensorDataset(torch.randn(24, 5), torch.randint(0, 3, (24,)))
train = strategy.distribute_dataset(data, 8, shuffle=True)


def train_step(x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y, reduction="sum") / len(x)
    loss = loss / strategy.num_replicas_in_sync
    loss.backward()
    optimizer.step()
    return loss.detach()


for _ in range(3):
    for batch in train:
        strategy.reduce("sum", strategy.run(train_step, args=batch))
