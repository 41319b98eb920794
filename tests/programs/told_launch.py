"""Started by the tests: a program that calls launch, whose towers save when they are told to end."""

import itertools
import os
import sys
import time

import torch

import mirrored
from tests.support.waiting import forever


def train(folder: str) -> None:
    strategy = mirrored.MirroredStrategy()
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
    if folder == "none":
        strategy.print(*strategy.gather(torch.tensor([os.getpid()])).tolist(), flush=True)
        forever()
    checkpoints = mirrored.CheckpointManager(strategy, folder, {"model": model})
    with checkpoints.resume():
        for step in itertools.count():
            strategy.run(time.sleep, args=(0.05,))
            if step == 3:
                strategy.print(*strategy.gather(torch.tensor([os.getpid()])).tolist(), flush=True)
            checkpoints.step()


if __name__ == "__main__":
    mirrored.launch(train, (sys.argv[1],), devices=["cpu:0", "cpu:1"])
