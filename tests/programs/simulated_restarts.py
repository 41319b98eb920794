"""``simulated_restarts.py FOLDER``: trains on all simulated devices; tower 1 loses its own in the fourth step."""

import os
import pathlib
import sys

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import mirrored
from tests.support.jobs import make_data

strategy = mirrored.MirroredStrategy(seed=0)
with strategy.scope():
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = strategy.distribute_dataset(TensorDataset(*make_data(44, torch.float32)), 8, shuffle=True)
objects = {"model": model, "optimizer": optimizer, "data": data}
folder = pathlib.Path(sys.argv[1], "run")
checkpoints = mirrored.CheckpointManager(strategy, folder, objects, every_steps=2, asynchronous=False)


def train_step(x: torch.Tensor, y: torch.Tensor) -> None:
    optimizer.zero_grad()
    mirrored.compute_average_loss(F.cross_entropy(model(x), y, reduction="none")).backward()
    optimizer.step()


with checkpoints.resume() as restored:
    strategy.print(f"{strategy.num_replicas_in_sync} after step {checkpoints.steps}", flush=True)
    for batch in data:
        if checkpoints.steps == 3 and strategy.topology.index == 1:
            pathlib.Path(os.environ["SIMULATED_LOST"]).touch()
            raise RuntimeError("the device is lost")
        strategy.run(train_step, args=batch)
        checkpoints.step()
strategy.print("has ended after step", checkpoints.steps)
