"""``restarts.py FOLDER [forgets|memory|full|…]``: trains, fails where FAIL says so, and goes on after a restart.

FAIL lists STEP:HOW:TOWER, or STEP:HOW:TOWER:once; HOW is ``raise``, a signal's number, ``wait`` for the file "go" or
"go" and the step, ``told`` to wait for a signal to save, or ``damage`` to raise after a byte of the snapshot has
changed. With VIRTUAL it has as many virtual towers. DISK is the number of steps between checkpoints, default 2;
"memory" keeps snapshots of every step, and "full" leaves no memory for them. With "ends its agent" a tower does that
before its strategy is made.
"""

import contextlib
import hashlib
import os
import pathlib
import signal
import sys
import time

import torch
from torch import nn

import mirrored

if "ends its agent" in sys.argv:
    os.kill(int(os.environ["TOWERS_AGENT_PID"]), signal.SIGKILL)
    os._exit(0)
kind = mirrored.MultiWorkerMirroredStrategy if "TF_CONFIG" in os.environ else mirrored.MirroredStrategy
devices = ["cpu:0", "cpu:1"][: int(os.environ.get("TOWERS", "2"))]
virtual = int(os.environ.get("VIRTUAL", "0")) or None
strategy = kind(devices=devices, seed=0, restarts=2, virtual_towers=virtual)
folder = pathlib.Path(sys.argv[1])
with strategy.scope():
    model = nn.Linear(8, 1)
inputs = torch.randn(64, 8)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
train = strategy.distribute_dataset(data, global_batch_size=8, shuffle=True)
forgets = "forgets" in sys.argv
if "full" in sys.argv:
    for file in pathlib.Path(os.environ["TOWERS_MEMORY"]).glob("file*"):
        file.write_bytes(b"!")
checkpoints = mirrored.CheckpointManager(
    strategy,
    folder / "run",
    {"model": model, "train": train},
    every_steps=int(os.environ.get("DISK", "2")),
    memory_every_steps=1 if "memory" in sys.argv else None,
    asynchronous=False,
)


def train_step(x: torch.Tensor, y: torch.Tensor) -> None:
    if virtual:
        strategy.backward(lambda x, y: (model(x) - y).square().mean(1), x, y)
    else:
        mirrored.compute_average_loss((model(x) - y).square().mean(1)).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(0.1 * parameter.grad)
            parameter.grad = None


def fail(step: int) -> None:
    for entry in filter(None, os.environ.get("FAIL", "").split(",")):
        at, how, tower, *once = entry.split(":")
        flag = folder / f"failed{at}"
        if int(at) != step or int(tower) != strategy.topology.index or (once and flag.exists()):
            continue
        flag.touch()
        if how == "damage":
            (tensors,) = pathlib.Path(os.environ["TOWERS_MEMORY"]).glob("*/step-*/tensors.safetensors")
            with open(tensors, "r+b") as file:
                file.seek(-1, os.SEEK_END)
                file.write(b"!")
        if how in ("raise", "damage"):
            raise ValueError("planned failure")
        if how == "wait":
            while not (folder / "go").exists() and not (folder / f"go{at}").exists():
                time.sleep(0.01)
        elif how == "told":
            while checkpoints._signals.received is None:
                time.sleep(0.01)
        else:
            os.kill(os.getpid(), int(how))


with contextlib.nullcontext() if forgets else checkpoints.resume() as restored:
    strategy.print("goes on after step", 0 if restored is None else restored.step, flush=True)
    for _ in train.epochs(2):
        for x, y in train:
            fail(checkpoints.steps + 1)
            strategy.run(train_step, args=(x, y))
            checkpoints.step()
numbers = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
strategy.print("has ended after step", checkpoints.steps, hashlib.sha256(numbers).hexdigest())
