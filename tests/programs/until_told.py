"""Started by the tests: trains, printing every step, and saves when it is told to end."""

import itertools
import sys
import time

import torch

import mirrored

strategy = mirrored.MirroredStrategy()
with strategy.scope():
    model = torch.nn.Linear(2, 1)
checkpoints = mirrored.CheckpointManager(strategy, sys.argv[1], {"model": model})
with checkpoints.resume():
    for step in itertools.count():
        strategy.run(time.sleep, args=(0.05,))
        strategy.print(f"step {step}", flush=True)
        checkpoints.step()
