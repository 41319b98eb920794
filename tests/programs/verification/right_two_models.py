"""Right: two models with an optimizer each, BatchNorm in eval mode, loss.mean() with even batches."""

import torch
from torch import nn

import mirrored

strategy = mirrored.MirroredStrategy()
with strategy.scope():
    encoder = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    decoder = nn.Linear(4, 6)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (encoder, decoder)]
encoder[1].eval()
train = strategy.distribute_dataset(torch.utils.data.TensorDataset(torch.randn(24, 6)), 8)


def train_step(x):
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss = (decoder(encoder(x)) - x).square().mean()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    return loss.detach()


for _ in range(3):
    for batch in train:
        loss = strategy.reduce("mean", strategy.run(train_step, args=batch))
