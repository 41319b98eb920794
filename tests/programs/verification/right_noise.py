"""Right: noise that run draws for each example (an autoencoder), a factor drawn outside of it, and a loader."""

import torch
import torch.nn.functional as F
from torch import nn

import mirrored

strategy = mirrored.MirroredStrategy()
with strategy.scope():
    encoder, decoder = nn.Linear(6, 4), nn.Linear(2, 6)
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=0.01)
data = torch.utils.data.TensorDataset(torch.rand(27, 6))
train = strategy.distribute_dataset(torch.utils.data.DataLoader(data, 8, shuffle=True))


def train_step(x, factor):
    optimizer.zero_grad()
    mean, spread = encoder(x).chunk(2, dim=1)
    code = mean + spread.exp() * torch.randn_like(mean)
    kept = (torch.rand(len(x), 1) < 0.9).float()
    per_example = F.mse_loss(decoder(code) * kept, factor * x, reduction="none").mean(1)
    mirrored.compute_average_loss(per_example).backward()
    optimizer.step()


for _ in range(3):
    for (x,) in train:
        strategy.run(train_step, args=(x, torch.rand(())))
