"""Mistakes that the first argument chooses, each on an otherwise right script."""

import os
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

import mirrored

KIND = sys.argv[1]
if KIND == "error everywhere":
    raise ValueError("planned failure")
strategy = mirrored.OneDeviceStrategy() if KIND == "no towers" else mirrored.MirroredStrategy()
if KIND == "error on one" and strategy.num_replicas_in_sync == 1:
    raise ValueError("planned failure")
if KIND == "error on towers" and strategy.topology.index == 1:
    raise ValueError("planned failure")
if KIND == "death" and strategy.topology.index == 1:
    os._exit(3)
if KIND == "from the clock":
    torch.manual_seed(time.time_ns())
    strategy = mirrored.MirroredStrategy()
with strategy.scope():
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
inputs, targets = torch.randn(24, 5), torch.randint(0, 3, (24,))
data = torch.utils.data.TensorDataset(inputs, targets)
train = strategy.distribute_dataset(data, 8)
if KIND == "full batches":
    sampler = torch.utils.data.DistributedSampler(data, strategy.num_replicas_in_sync, strategy.topology.index)
    train = torch.utils.data.DataLoader(data, 8, sampler=sampler)
if KIND == "whole batches everywhere":
    train = torch.utils.data.DataLoader(data, 8)


def train_step(x, y):
    optimizer.zero_grad()
    per_example = F.cross_entropy(model(x), y, reduction="none")
    if KIND == "spread of the share":
        per_example = per_example / per_example.std()
    if KIND == "random order":
        per_example = per_example * (1 + torch.randperm(len(x)))
    loss = mirrored.compute_average_loss(per_example)
    loss.backward()
    if KIND == "gradient on one tower" and strategy.is_chief and strategy.num_replicas_in_sync > 1:
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    optimizer.step()
    return loss.detach()


epochs = 4 // strategy.num_replicas_in_sync if KIND == "epochs" else 4
for _ in range(0 if KIND == "no training" else epochs):
    for batch in train:
        loss = strategy.run(train_step, args=batch)
        if KIND == "change and fail" and strategy.num_replicas_in_sync > 1:
            if strategy.is_chief:
                model[0].bias.data.zero_()
            raise mirrored.MirrorError("a check has found a difference")
        if KIND == "mean of shares":
            strategy.reduce("mean", loss)
