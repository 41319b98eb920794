"""Right: a model in float64, whose metrics are float32."""

import torch
from torch import nn

import mirrored

strategy = mirrored.MirroredStrategy()
with strategy.scope():
    model = nn.Linear(5, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(27, 5, dtype=torch.float64))
train = strategy.distribute_dataset(data, 8)


def train_step(x):
    optimizer.zero_grad()
    losses = (model(x)[:, 0] - x.sum(1)).square()
    mirrored.compute_average_loss(losses).backward()
    optimizer.step()
    return losses.detach().float().sum(), torch.tensor(float(losses.detach().sum()))


for _ in range(3):
    for batch in train:
        sums = strategy.reduce("sum", strategy.run(train_step, args=batch))
        strategy.reduce("max", float(sums[0]))
