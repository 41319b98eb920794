"""Started by the tests in every way: communicates once, says so, and waits to be looked at."""

import sys
import time

import torch
import torch.distributed as dist
from torch import nn

import mirrored


def work() -> None:
    if "group" in sys.argv:
        dist.init_process_group("gloo")
    strategy = mirrored.MultiWorkerMirroredStrategy(
        devices=["cpu:0", "cpu:1"] if "two" in sys.argv else None,
        communication=mirrored.CommunicationOptions(
            implementation="gloo" if "gloo" in sys.argv else "auto", startup_timeout_seconds=20
        ),
    )
    with strategy.scope():
        model = nn.Linear(1, 1)
    strategy.run(lambda: model(torch.ones(1, 1)).sum().backward())
    strategy.reduce("sum", 1)
    strategy.print("ready", flush=True)
    time.sleep(0 if "end" in sys.argv else 60)


if __name__ == "__main__":
    if "launch" in sys.argv:
        mirrored.launch(work)
    else:
        work()
