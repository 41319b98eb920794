"""An evaluation, and steps that are made by hand: there is no step of an optimizer to compare."""

import torch
import torch.nn.functional as F
from torch import nn

import mirrored

strategy = mirrored.MirroredStrategy()
with strategy.scope():
    model = nn.Linear(5, 3)
data = torch.utils.data.TensorDataset(torch.randn(24, 5), torch.randint(0, 3, (24,)))
train = strategy.distribute_dataset(data, 8)


def train_step(x, y):
    loss = mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none"))
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    model.zero_grad()
    return loss.detach()


for batch in train:
    strategy.reduce("sum", strategy.run(train_step, args=batch))
