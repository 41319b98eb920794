"""Two towers train; in step 5, tower 1 does as it is told: die, raise, or sleep."""

import os
import signal
import sys
import time

import torch

import mirrored
from tests.support.waiting import forever

options = mirrored.CommunicationOptions(timeout_seconds=float(sys.argv[2]))
strategy = mirrored.MirroredStrategy(communication=options)
with strategy.scope():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def step() -> float:
    if strategy.health.step == 5 and strategy.topology.index == 1:
        print(f"{time.monotonic()}", flush=True)
        if sys.argv[1] == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif sys.argv[1] == "raise":
            raise ValueError("boom")
        forever()
    optimizer.zero_grad()
    loss = model(torch.ones(2, 4, device=strategy.device)).mean()
    loss.backward()
    optimizer.step()
    return float(loss)


for _ in range(1000):
    strategy.run(step)
