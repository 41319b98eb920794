"""Right: strategy.grad, gradients put into place by hand, those of each example by torch.func, torchmetrics."""

import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

import mirrored

strategy = mirrored.MirroredStrategy()
with strategy.scope():
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, nesterov=True, momentum=0.9)
accuracy = strategy.mirror(MulticlassAccuracy(3))
data = torch.utils.data.TensorDataset(torch.randn(43, 5), torch.randint(0, 3, (43,)))
train = strategy.distribute_dataset(data, 8, shuffle=True)


def loss_of(parameters, x, y):
    return F.cross_entropy(torch.func.functional_call(model, parameters, (x[None],)), y[None])


def largest_gradient(x, y):
    if len(x) == 0:
        return torch.zeros(())
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    each = torch.func.vmap(torch.func.grad(loss_of), (None, 0, 0), randomness="different")(parameters, x, y)
    return sum(gradient.flatten(1).square().sum(1) for gradient in each.values()).max()


def train_step(x, y):
    logits = model(x)
    loss = mirrored.compute_average_loss(F.cross_entropy(logits, y, reduction="none"))
    parameters = list(model.parameters())
    for parameter, gradient in zip(parameters, strategy.grad(loss, parameters), strict=True):
        parameter.grad = gradient
    optimizer.step()
    accuracy.update(logits.detach(), y)
    return loss.detach(), largest_gradient(x, y)


for _ in range(3):
    for batch in train:
        loss, largest = strategy.run(train_step, args=batch)
        strategy.reduce("sum", loss)
        strategy.reduce("max", largest)
    strategy.print(float(accuracy.compute()))
    accuracy.reset()
