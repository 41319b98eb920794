"""A moving average of the weights, evaluated when all epochs are over; the first argument says by whom.

Right: "all" (updated and evaluated by all towers), "chief" (by the chief alone). Wrong: "chief updates" (all evaluate),
which "many epochs" keeps out of reach.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import mirrored

KIND = sys.argv[1]
strategy = mirrored.MirroredStrategy()
with strategy.scope():
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
data = torch.utils.data.TensorDataset(torch.randn(43, 5), torch.randint(0, 3, (43,)))
train = strategy.distribute_dataset(data, 8, shuffle=True)
test = strategy.distribute_dataset(data, 16)


def train_step(x, y):
    optimizer.zero_grad()
    mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none")).backward()
    optimizer.step()


@torch.no_grad()
def test_step(x, y):
    return F.cross_entropy(average(x), y, reduction="sum"), len(y)


for _ in range(200 if "many epochs" in sys.argv else 3):
    for batch in train:
        strategy.run(train_step, args=batch)
        if strategy.is_chief or KIND == "all":
            average.update_parameters(model)
if KIND == "chief":
    if strategy.is_chief:
        with torch.no_grad():
            print(float(F.cross_entropy(average(data.tensors[0]), data.tensors[1])))
else:
    sums = [strategy.reduce("sum", strategy.run(test_step, args=batch)) for batch in test]
    strategy.print(sum(float(loss) for loss, _ in sums) / sum(count for _, count in sums))
