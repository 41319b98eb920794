"""Right to the bit: virtual towers, with dropout, batch norm and ragged batches."""

import torch
import torch.nn.functional as F
from torch import nn

import mirrored

strategy = mirrored.MirroredStrategy(virtual_towers=4, seed=0)
with strategy.scope():
    model = nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.randn(40, 5), torch.randint(0, 3, (40,)))
train = strategy.distribute_dataset(data, 16, shuffle=True)


def train_step(x, y):
    optimizer.zero_grad()
    loss = strategy.backward(lambda x, y: F.cross_entropy(model(x), y, reduction="none"), x, y)
    optimizer.step()
    return loss


for _ in range(3):
    for batch in train:
        strategy.reduce("mean", strategy.run(train_step, args=batch))
