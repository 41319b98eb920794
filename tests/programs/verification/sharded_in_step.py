"""Wrong: the step takes its part of a share that is this tower's part already."""

import torch
import torch.nn.functional as F
from torch import nn

import mirrored

strategy = mirrored.MirroredStrategy()
with strategy.scope():
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

data = torch.utils.data.TensorDataset(torch.randn(48, 5), torch.randint(0, 3, (48,)))
train = strategy.distribute_dataset(data, 8, shuffle=True)


def train_step(x, y):
    own = slice(strategy.topology.index, None, strategy.num_replicas_in_sync)
    optimizer.zero_grad()
    F.cross_entropy(model(x[own]), y[own]).backward()
    optimizer.step()


for _ in range(3):
    for batch in train:
        strategy.run(train_step, args=batch)
