"""Wrong: every tower takes its part of the examples, and the strategy shares out that part again."""

import torch
import torch.nn.functional as F
from torch import nn

import mirrored

strategy = mirrored.MirroredStrategy()
with strategy.scope():
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

inputs, targets = torch.randn(48, 5), torch.randint(0, 3, (48,))
index, count = strategy.topology.index, strategy.num_replicas_in_sync
data = torch.utils.data.TensorDataset(inputs[index::count], targets[index::count])
train = strategy.distribute_dataset(data, 8, shuffle=True)


def train_step(x, y):
    optimizer.zero_grad()
    mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none")).backward()
    optimizer.step()


for _ in range(3):
    for batch in train:
        strategy.run(train_step, args=batch)
