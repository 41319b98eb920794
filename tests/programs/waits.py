"""Started by the tests in every way: communicates once, says so, and waits to be looked at."""

import sys

import torch
import torch.distributed as dist
from torch import nn

import mirrored
from tests.support.waiting import forever


def work() -> None:
    if "group" in sys.argv:
        dist.init_process_group("gloo")
    strategy = mirrored.MultiWorkerMirroredStrategy(
        devices=["cpu:0", "cpu:1"] if "two" in sys.argv else None,
        communication=mirrored.CommunicationOptions(implementation="gloo" if "gloo" in sys.argv else "auto"),
    )
    with strategy.scope():
        model = nn.Linear(1, 1)
    strategy.run(lambda: model(torch.ones(1, 1)).sum().backward())
    strategy.reduce("sum", 1)
    strategy.print("ready", flush=True)
    if "end" not in sys.argv:
        forever()


if __name__ == "__main__":
    if "launch" in sys.argv:
        mirrored.launch(work)
    else:
        work()
