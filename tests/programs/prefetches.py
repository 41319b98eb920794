"""Started by the tests: trains until it is told to end, beside a thread, a pool or an exit handler that never ends.

    prefetches.py FOLDER thread|pool|handler 1|all [launch]

The number is that of the tower that has it.
"""

import atexit
import concurrent.futures
import itertools
import sys
import threading
import time

import torch

import mirrored
from tests.support.waiting import forever

folder, kind, where, *how = sys.argv[1:]


def train() -> None:
    strategy = mirrored.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
    if where in ("all", str(strategy.topology.index)):
        if kind == "thread":
            threading.Thread(target=forever).start()
        elif kind == "handler":
            atexit.register(forever)
        else:
            concurrent.futures.ThreadPoolExecutor().submit(forever)
    checkpoints = mirrored.CheckpointManager(strategy, folder, {"model": model})
    with checkpoints.resume():
        for step in itertools.count():
            strategy.run(time.sleep, args=(0.05,))
            strategy.print(f"step {step}", flush=True)
            checkpoints.step()


if __name__ == "__main__":
    if how:
        mirrored.launch(train, devices=["cpu:0", "cpu:1"])
    else:
        train()
