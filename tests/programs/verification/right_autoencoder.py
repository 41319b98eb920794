"""Right: a convolutional autoencoder with BatchNorm over the global batch and a mean loss, on even batches."""

import torch
import torch.nn.functional as F
from torch import nn

import mirrored

strategy = mirrored.MirroredStrategy()
with strategy.scope(sync_batch_norm=True):
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.ConvTranspose2d(4, 8, 4, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1)),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
pictures = torch.utils.data.TensorDataset(torch.rand(32, 1, 8, 8))
train = strategy.distribute_dataset(pictures, 8, shuffle=True)


def train_step(x):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x + 0.1 * torch.randn_like(x)), x)
    loss.backward()
    optimizer.step()
    return loss.detach()


for _ in range(3):
    total = 0.0
    for batch in train:
        total += float(strategy.reduce("mean", strategy.run(train_step, args=batch)))
    strategy.print(total / len(train))
