"""Started by the tests: trains, and in a chosen step and phase of one tower does what is asked for.

    python unwell.py TOWERS HOW TOWER STEP PHASE [key=value …]

The last words are options of CommunicationOptions. HOW: raise, die, stop, sleep.
"""

import os
import signal
import sys
import time

import torch

import mirrored

towers, how, chosen, step, phase, *rest = sys.argv[1:]
options = {key: float(value) if key.endswith("seconds") else value for key, value in (w.split("=") for w in rest)}
strategy = mirrored.MultiWorkerMirroredStrategy(
    devices=[f"cpu:{i}" for i in range(int(towers))] if towers != "0" else None,
    communication=mirrored.CommunicationOptions(**options),
    mirror_check_interval=None,
)
tower = strategy.topology.index


def something_happens(now: str) -> None:
    if (tower, strategy.health.step, now) != (int(chosen), int(step), phase):
        return
    print(f"{time.time()}", file=sys.stderr, flush=True)
    if how == "raise":
        raise ValueError("boom")
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if how == "sleep":
        time.sleep(60)


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
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer.register_step_pre_hook(lambda *_: something_happens("optimizer"))


def train_step(x):
    something_happens("forward")
    optimizer.zero_grad()
    hidden = model[0](x)
    model[1](Slow.apply(hidden)).mean().backward()
    optimizer.step()
    something_happens("end")


for x in strategy.distribute_dataset(Data(), 4):
    strategy.run(train_step, args=(x,))
    something_happens("between")
