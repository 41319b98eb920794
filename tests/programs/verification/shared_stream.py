"""Wrong: the generators are seeded alike on all towers at every step, so dropout drops alike."""

import torch
import torch.nn.functional as F
from torch import nn

import mirrored

strategy = mirrored.MirroredStrategy()
with strategy.scope():
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(24, 5), torch.randint(0, 3, (24,)))
train = strategy.distribute_dataset(data, 8, shuffle=True)


def train_step(x, y, seed):
    torch.manual_seed(seed)
    optimizer.zero_grad()
    loss = mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none"))
    loss.backward()
    optimizer.step()


for epoch in range(3):
    for step, batch in enumerate(train):
        strategy.run(train_step, args=(*batch, 1000 * epoch + step))
