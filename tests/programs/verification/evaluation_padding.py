"""Wrong: a sampler for evaluation that repeats examples until all towers have as many; with "drop", it drops some."""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mirrored

strategy = mirrored.MirroredStrategy()
with strategy.scope():
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

data = TensorDataset(torch.randn(24, 5), torch.randint(0, 3, (24,)))
train = strategy.distribute_dataset(data, 8, shuffle=True)
test_set = TensorDataset(torch.randn(11, 5), torch.randint(0, 3, (11,)))
sampler = DistributedSampler(
    test_set, strategy.num_replicas_in_sync, strategy.topology.index, shuffle=False, drop_last="drop" in sys.argv
)
test = DataLoader(test_set, 4, sampler=sampler)


def train_step(x, y):
    optimizer.zero_grad()
    mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none")).backward()
    optimizer.step()


for _ in range(2):
    for batch in train:
        strategy.run(train_step, args=batch)
    with torch.no_grad():
        losses = torch.cat([F.cross_entropy(model(x), y, reduction="none") for x, y in test])
    total, count = strategy.reduce("sum", (losses.sum(), len(losses)))
    strategy.print(float(total) / count)
