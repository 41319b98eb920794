"""Right: the multi-GPU trainer of TensorFlow's CIFAR-10 tutorial, on small random pictures.

Local response normalisation, a penalty on some weights, a staircase for the learning rate, a moving average of all
weights, which is what is evaluated.
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mirrored

strategy = mirrored.MirroredStrategy(seed=1)
with strategy.scope():
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1), nn.LocalResponseNorm(4)),
        *(nn.Conv2d(8, 8, 5, padding=2), nn.ReLU(), nn.LocalResponseNorm(4), nn.MaxPool2d(3, 2, padding=1)),
        *(nn.Flatten(), nn.Linear(128, 24), nn.ReLU(), nn.Linear(24, 10)),
    )
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
pictures = torch.utils.data.TensorDataset(torch.randn(59, 3, 16, 16), torch.randint(0, 10, (59,)))
train = strategy.distribute_dataset(pictures, 16, shuffle=True)
test = strategy.distribute_dataset(pictures, 32)


def train_step(x, y):
    optimizer.zero_grad()
    loss = mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none"))
    penalty = mirrored.scale_regularization_loss(0.004 * model[9].weight.square().sum() / 2)
    (loss + penalty).backward()
    optimizer.step()
    schedule.step()
    average.update_parameters(model)
    return (loss + penalty).detach()


@torch.no_grad()
def test_step(x, y):
    return (average(x).argmax(1) == y).sum(), len(y)


for _ in range(4):
    for batch in train:
        strategy.reduce("sum", strategy.run(train_step, args=batch))
average.eval()
found = [strategy.reduce("sum", strategy.run(test_step, args=batch)) for batch in test]
strategy.print(sum(int(hits) for hits, _ in found) / sum(count for _, count in found))
