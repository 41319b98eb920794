"""Started by the tests: trains until all towers are told to end, beside a thread, a pool or an exit handler that never
ends.

    prefetches.py FOLDER thread|pool|handler|nothing 1|all|nowhere [launch]

The number is that of the tower that has it.
"""

import atexit
import concurrent.futures
import itertools
import signal
import sys
import threading
import time

import torch

import mirrored
from tests.support.waiting import forever, wait_until

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
            if step == 3:
                strategy.reduce("sum", 1)  # all towers handle signals
                strategy.print("step 3", flush=True)
                wait_until(lambda: signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)  # this tower is told
            checkpoints.step()


if __name__ == "__main__":
    if how:
        mirrored.launch(train, devices=["cpu:0", "cpu:1"])
    else:
        train()
