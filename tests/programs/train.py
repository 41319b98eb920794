"""Started in every way by the tests: a small training, whose last loss depends on what every tower has done.

The step is written out: torch's optimizers load its compiler, which takes a second of each process.
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

import mirrored

strategy = mirrored.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"] if "two" in sys.argv else None, seed=0)
with strategy.scope():
    model = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 3))
velocities = [torch.zeros_like(parameter) for parameter in model.parameters()]
inputs = torch.randn(500, 8)
data = torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))


def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none"))
    loss.backward()
    with torch.no_grad():
        for parameter, velocity in zip(model.parameters(), velocities, strict=True):
            velocity.mul_(0.9).add_(parameter.grad)
            parameter.sub_(0.3 * velocity)
            parameter.grad = None
    return loss.detach()


for _ in range(2):
    for x, y in strategy.distribute_dataset(data, global_batch_size=64, shuffle=True):
        loss = strategy.reduce("sum", strategy.run(train_step, args=(x, y)))
strategy.print(f"towers {strategy.num_replicas_in_sync}, final loss {float(loss):.9g}")
