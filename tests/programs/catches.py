"""Started by the tests: tower 1 fails in step 3, and the script catches the errors of all steps.

Arguments: where it fails, and how the script catches.
"""

import contextlib
import os
import sys

import torch
from torch import nn

import mirrored

where, how = sys.argv[1:]
kind = mirrored.MultiWorkerMirroredStrategy if "TF_CONFIG" in os.environ else mirrored.MirroredStrategy
strategy = kind(seed=0)
with strategy.scope():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
calls = 0


def fail_in(place: str) -> None:
    if place == where and calls == 3 and strategy.topology.index == 1:
        raise RuntimeError("CUDA out of memory")


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        fail_in("backward")
        return gradient


def train_step(x: torch.Tensor) -> None:
    global calls
    calls += 1
    fail_in("forward")
    optimizer.zero_grad()
    mirrored.compute_average_loss(model[1](Fails.apply(model[0](x)))[:, 0]).backward()
    fail_in("after")
    optimizer.step()


def train() -> None:
    for _ in range(6):
        if how == "except RuntimeError":
            try:
                strategy.run(train_step, args=(torch.ones(4, 2),))
            except RuntimeError as error:
                if strategy.topology.index == 0:
                    assert "out of memory" not in str(error)
        elif how == "suppress":
            with contextlib.suppress(Exception):
                strategy.run(train_step, args=(torch.ones(4, 2),))
        else:
            strategy.run(train_step, args=(torch.ones(4, 2),))


if how == "exit":
    try:
        train()
    except Exception:
        sys.exit(0)
elif how == "finally":
    try:
        train()
    finally:
        calls = 0  # as a script that saves its model does
else:
    train()
print("the final number", flush=True)
