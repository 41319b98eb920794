"""A training script on the simulated accelerator; prints the sum of its parameters and the devices it used."""

import os

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import mirrored
from tests import simulated_device
from tests.support.jobs import make_data

if os.environ.get("MIRRORED_TEST_DEVICE") != "tpu":  # which torch loads by itself
    simulated_device.load()
strategy = getattr(mirrored, os.environ.get("STRATEGY", "MirroredStrategy"))(seed=0)
with strategy.scope():
    model = torch.nn.Sequential(torch.nn.Linear(5, 16), torch.nn.Dropout(0.1), torch.nn.Linear(16, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = strategy.distribute_dataset(TensorDataset(*make_data(44, torch.float32)), 8, shuffle=True)


def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none"))
    loss.backward()
    optimizer.step()
    return loss


for batch in data:
    loss = strategy.reduce("sum", strategy.run(train_step, args=batch))
devices = strategy.gather(torch.tensor([strategy.device.index], device=strategy.device)).tolist()
strategy.print(f"devices {devices}, loss {float(loss):.6f}")
