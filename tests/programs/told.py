"""Started by the tests: towers that handle SIGTERM and SIGINT; the first word says how.

agree: end the step, agree that one was told, and end with exit code 75 at different moments.
stubborn: ignore them. stubborn-fail: and tower 1 fails after three steps.
user: like agree, on SIGUSR1.
"""

import itertools
import os
import signal
import sys
import time

import torch

import mirrored
from towers.health.failure import EXIT_PREEMPTED

strategy = mirrored.MirroredStrategy()
model = strategy.mirror(torch.nn.Linear(1, 1))
told = False


def train_step() -> None:
    time.sleep(0.05)
    model(torch.ones(1, 1)).sum().backward()


def handle(*_: object) -> None:
    global told
    told = True


signal.signal(signal.SIGTERM, handle)
signal.signal(signal.SIGINT, handle)
if sys.argv[1] == "user":
    signal.signal(signal.SIGUSR1, handle)
processes = strategy.gather(torch.tensor([os.getpid()])).tolist()
for step in itertools.count():
    strategy.run(train_step)
    someone = strategy.reduce("max", int(told))
    if someone and sys.argv[1] == "stubborn":
        strategy.print("told", flush=True)
        told = False
    if step == 3:
        strategy.print(*processes, flush=True)
        if sys.argv[1] == "stubborn-fail" and strategy.topology.index == 1:
            raise ValueError("boom")
    if someone and sys.argv[1] in ("agree", "user"):
        strategy.print("saved", flush=True)
        time.sleep(0.3 * strategy.topology.index)
        sys.exit(EXIT_PREEMPTED)
