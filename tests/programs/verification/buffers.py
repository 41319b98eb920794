"""A layer that follows its inputs in buffers. Right: "all" (over all towers' examples). Wrong: "own"."""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import mirrored

KIND = sys.argv[1]
strategy = mirrored.MirroredStrategy()


class Following(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("newest", torch.zeros(0), persistent=False)

    def forward(self, x):
        if self.training:
            sums = x.detach().sum(0), torch.tensor(float(len(x)))
            if KIND == "all":
                sums = mirrored.get_replica_context().all_reduce("sum", sums)
            self.mean.lerp_(sums[0] / sums[1], 0.1)
            self.calls += 1
            self.newest = x.detach()
        return x


with strategy.scope():
    model = nn.Sequential(Following(), nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(48, 5), torch.randint(0, 3, (48,)))
train = strategy.distribute_dataset(data, 8, shuffle=True)


def train_step(x, y):
    optimizer.zero_grad()
    mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none")).backward()
    optimizer.step()


for _ in range(3):
    for batch in train:
        strategy.run(train_step, args=batch)
