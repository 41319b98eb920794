"""Two halves of each share, the first under no_sync. Right: "clip after". Wrong: "clip inside", "hook"."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import mirrored

KIND = sys.argv[1]
strategy = mirrored.MirroredStrategy()
with strategy.scope():
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if KIND == "hook":
    model[2].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
data = torch.utils.data.TensorDataset(torch.randn(40, 5), torch.randint(0, 3, (40,)))
train = strategy.distribute_dataset(data, 8)


def backward_of(x, y, size):
    losses = F.cross_entropy(model(x), y, reduction="none")
    mirrored.compute_average_loss(losses, global_batch_size=size).backward()


def train_step(x, y):
    optimizer.zero_grad()
    half = len(x) // 2
    with strategy.no_sync():
        backward_of(x[:half], y[:half], 8)
        if KIND == "clip inside":
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    backward_of(x[half:], y[half:], 8)
    if KIND == "clip after":
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()


for _ in range(3):
    for batch in train:
        strategy.run(train_step, args=batch)
