"""Right: strategy.grad, gradients that are written by hand, a torchmetrics metric, and a closure."""

import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

import mirrored

strategy = mirrored.MirroredStrategy()
with strategy.scope():
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, nesterov=True, momentum=0.9)
accuracy = strategy.mirror(MulticlassAccuracy(3))
data = torch.utils.data.TensorDataset(torch.randn(43, 5), torch.randint(0, 3, (43,)))
train = strategy.distribute_dataset(data, 8, shuffle=True)


def train_step(x, y):
    logits = model(x)
    loss = mirrored.compute_average_loss(F.cross_entropy(logits, y, reduction="none"))
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, strategy.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    optimizer.step()
    accuracy.update(logits.detach(), y)
    return loss.detach()


for _ in range(3):
    for batch in train:
        strategy.reduce("sum", strategy.run(train_step, args=batch))
    strategy.print(float(accuracy.compute()))
    accuracy.reset()
