"""Started by the tests: towers that are equal in all checks, and not any more when they end.

The step is written out: torch's optimizers load its compiler, which takes a second of each process.
"""

import atexit
import gc
import os
import sys

import torch
from torch import nn

import mirrored
from tests.support.waiting import forever, wait_until

kind, *signs = sys.argv[1:]
if signs and os.environ["RANK"] == "0":  # it leaves last, and then stays until it is killed
    atexit.register(forever)
    atexit.register(open, signs[0], "w")
strategy = mirrored.MirroredStrategy(mirror_check_interval=None if kind == "unchecked" else 250, seed=0)
with strategy.scope():
    model = nn.Linear(4, 2)


def train_step() -> None:
    model(torch.ones(1, 4)).sum().backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1 * parameter.grad)
            parameter.grad = None


for _ in range(3):
    strategy.run(train_step)
if kind in ("drifts", "unchecked") and strategy.topology.index == 1:
    with torch.no_grad():
        model.bias[0] += 1e-7
if kind == "drops" and strategy.topology.index == 1:
    del model, train_step
    gc.collect()
if kind == "fails":
    raise SystemExit(3)
if signs and strategy.topology.index == 1:
    wait_until(lambda: os.path.exists(signs[0]))
strategy.print("done")
