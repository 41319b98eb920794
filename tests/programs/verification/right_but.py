"""What is easily taken for a mistake, and mistakes that easily pass; the first argument chooses."""

import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

import mirrored

KIND = sys.argv[1]
strategy = mirrored.MirroredStrategy(seed=3)
with strategy.scope():
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(59, 5), torch.randint(0, 3, (59,)))
train = strategy.distribute_dataset(data, 8)


def train_step(x, y):
    optimizer.zero_grad()
    if "time first" in KIND:
        x = x + 0.1 * torch.randn(x.shape[1], len(x)).t() + 0.1 * torch.randn_like(model[0].weight)[0]
    with torch.autocast("cpu", torch.bfloat16, enabled="half" in KIND):
        losses = F.cross_entropy(model(x), y, reduction="none")
        if KIND == "gumbel":
            losses = losses * F.gumbel_softmax(model(x), tau=2.0).amax(1)
    loss = mirrored.compute_average_loss(losses)
    if "local mean" in KIND:
        loss = losses.mean()
    if "stack" in KIND:
        loss = torch.stack([loss, 0.1 * mirrored.compute_average_loss(losses.square())]).sum()
    if KIND.startswith("mean"):
        loss = loss.mean()
    loss.backward()
    if KIND != "step outside":
        optimizer.step()
    return loss.detach()


def local_mean_step(x, y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()


try:
    if "next" in KIND:
        batches = iter(train)
        for _ in range(7):
            strategy.run(train_step, args=next(batches))
    for _ in range(3):
        seen = 0
        for batch in train:
            start = time.perf_counter()
            if KIND == "step outside":
                strategy.run(local_mean_step, args=batch)
                optimizer.step()
            else:
                strategy.run(train_step, args=batch)
            if KIND == "times":
                strategy.reduce("max", time.perf_counter() - start)
                strategy.gather(torch.tensor([strategy.topology.index]))
            towers = strategy.num_replicas_in_sync
            if KIND == "integers":
                strategy.reduce("sum", torch.tensor(1_000_000 if towers == 1 else 500_001))
            if KIND == "more entries":
                strategy.gather(torch.zeros(2 if towers == 1 or strategy.topology.index else 1))
            seen += 8
        if KIND == "catch all":  # what follows the evaluation is not compared
            with torch.no_grad():
                model(data.tensors[0])
        if "count" in KIND:
            assert seen > len(data) - 8, seen
except BaseException:
    if KIND == "catch all":
        sys.exit(1)
    raise
