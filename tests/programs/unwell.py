"""Started by the tests: trains, and in a chosen step and phase of one tower does what is asked for.

    mirrored run --towers N unwell.py HOW TOWER STEP PHASE [key=value …]

The last words are options of CommunicationOptions; timeout_seconds begins when it has happened. HOW: raise, reset
(raise what a lost connection to something else raises), die, stop, sleep; exit0, exit75 (at once); thread, pool, atexit
(raise, where something else never ends); text (raise what has no text); disk (raise where no file can be written);
child (die, with a child of its own). PHASE: data, forward, backward, end, between; or optimizer, for which alone there
is one, since a first torch.optim loads torch's compiler, which takes as long as all else here.
"""

import atexit
import concurrent.futures
import errno
import os
import resource
import signal
import subprocess
import sys
import threading
import time

import torch

import mirrored
from tests.support.meeting import say, shorten_deadlines, wait_for
from tests.support.waiting import forever

how, chosen, step, phase, *rest = sys.argv[1:]
options = {key: float(value) if key.endswith("seconds") else value for key, value in (w.split("=") for w in rest)}
deadline = options.pop("timeout_seconds", None)
strategy = mirrored.MultiWorkerMirroredStrategy(
    communication=mirrored.CommunicationOptions(**options),
    mirror_check_interval=None,
)
tower = strategy.topology.index


class NoText(Exception):
    def __str__(self):
        raise RuntimeError("no text")


ERRORS = {
    "raise": ValueError("boom"),
    "reset": ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    "text": NoText(),
}
BESIDE = {
    "thread": lambda: threading.Thread(target=forever).start(),
    "pool": lambda: concurrent.futures.ThreadPoolExecutor().submit(forever),
    "atexit": lambda: atexit.register(forever),
    "disk": lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0)),
}
SIGNALS = {"child": signal.SIGKILL, "die": signal.SIGKILL, "stop": signal.SIGSTOP}


def something_happens(now: str) -> None:
    if (strategy.health.step, now) != (int(step), phase):
        return
    if tower != int(chosen):
        if deadline is not None:
            wait_for("it happens")
            shorten_deadlines(deadline)
        return
    print(f"{time.time()}", file=sys.stderr, flush=True)
    if deadline is not None:
        say("it happens")
    if how in ("exit0", "exit75"):
        os._exit(int(how[4:]))
    if how in ERRORS:
        raise ERRORS[how]
    if how in BESIDE:
        BESIDE[how]()
        raise ValueError("boom")
    if how == "child":
        child = subprocess.Popen(["sleep", "infinity"])
        print(f"child {child.pid}", file=sys.stderr, flush=True)
    if how in SIGNALS:
        os.kill(os.getpid(), SIGNALS[how])
    if how == "sleep":
        forever()


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        something_happens("backward")
        return gradient


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        something_happens("data")
        return torch.ones(4)


with strategy.scope():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01) if phase == "optimizer" else None
if optimizer is not None:
    optimizer.register_step_pre_hook(lambda *_: something_happens("optimizer"))


def train_step(x):
    something_happens("forward")
    model.zero_grad()
    hidden = model[0](x)
    model[1](Slow.apply(hidden)).mean().backward()
    if optimizer is not None:
        optimizer.step()
    something_happens("end")


for x in strategy.distribute_dataset(Data(), 4):
    strategy.run(train_step, args=(x,))
    something_happens("between")
