"""Right: ragged batches with compute_average_loss."""

import torch
import torch.nn.functional as F
from torch import nn

import mirrored

strategy = mirrored.MirroredStrategy(["cpu:0", "cpu:1"])
with strategy.scope():
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = torch.utils.data.TensorDataset(torch.randn(27, 5), torch.randint(0, 3, (27,)))
train = strategy.distribute_dataset(data, 8, shuffle=True)


def train_step(x, y):
    optimizer.zero_grad()
    loss = mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none"))
    loss.backward()
    optimizer.step()
    return loss.detach()


for epoch in range(3):
    for batch in train:
        loss = strategy.reduce("sum", strategy.run(train_step, args=batch))
    strategy.print(f"epoch {epoch}: {float(loss):.4f}")
