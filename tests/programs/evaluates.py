"""A task of a TF_CONFIG cluster: workers train until the evaluator stops them, or the evaluator."""

import sys

import torch

import mirrored
from mirrored.evaluation import EarlyStopping, Evaluator, Exporter, is_evaluator

strategy = mirrored.MultiWorkerMirroredStrategy(seed=0)
with strategy.scope():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
data = strategy.distribute_dataset(torch.randn(64, 2), 8, shuffle=True)


def train_step(x):
    optimizer.zero_grad()
    mirrored.compute_average_loss(model(x).square()).backward()
    optimizer.step()


def evaluate():
    return {"loss": 1.0, "weight": model.weight.sum()}


folder = sys.argv[1]
if is_evaluator(strategy):
    settings = {"exporters": [Exporter("best", "loss")], "stop": EarlyStopping("loss", 30)}
    rows = Evaluator(strategy, folder, {"model": model}, evaluate, **settings).run()
    print("evaluated", *(row["step"] for row in rows))
else:
    manager = mirrored.CheckpointManager(strategy, folder, {"model": model, "train": data}, every_steps=10)
    with manager.resume():
        while True:
            for x in data:
                strategy.run(train_step, args=(x,))
                manager.step()
    print("stopped after step", manager.steps)
