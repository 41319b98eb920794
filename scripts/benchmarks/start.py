"""Seconds from a command to the first step of two CPU towers, and from a failure to the next first step.

"python" and "torchrun" start one script with a ``MirroredStrategy``, "DDP" is the same step with torch's DDP on Gloo
under torchrun, and "restart" is what passes between the first step of "python", after which a checkpoint is saved and
tower 0 killed, and the next one. All take turns; medians are printed, and ratios to DDP.
"""

from __future__ import annotations

import itertools
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import command

OURS = """
import os, signal, sys
import torch
import mirrored

restarts = int(sys.argv[1])
devices = [f"cpu:{i}" for i in range(int(sys.argv[2]))]
strategy = mirrored.MirroredStrategy(devices=devices, seed=0, restarts=restarts)
with strategy.scope():
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)


def train_step(x):
    optimizer.zero_grad()
    mirrored.compute_average_loss(model(x).square().mean(1)).backward()
    optimizer.step()


folder, flag = sys.argv[3], f"{sys.argv[3]}/failed"
if restarts:
    checkpoints = mirrored.CheckpointManager(strategy, f"{folder}/run", {"model": model, "optimizer": optimizer})
    checkpoints.restore_newest()
strategy.run(train_step, args=(torch.randn(8, 64),))
strategy.print("first step", flush=True)
if restarts and not os.path.exists(flag):
    checkpoints.step()
    checkpoints.save(wait=True)
    if strategy.is_chief:
        open(flag, "w").close()
        os.kill(os.getpid(), signal.SIGKILL)
    strategy.barrier()
"""

DDP = """
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
optimizer.zero_grad()
model(torch.randn(8, 64)).square().mean().backward()
optimizer.step()
if dist.get_rank() == 0:
    print("first step", flush=True)
dist.destroy_process_group()
"""


def _seconds(words: Sequence[str], steps: int = 1) -> list[float]:
    """When each first step was made, after the one before or after the start."""
    times = [time.monotonic()]
    with subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        times += [time.monotonic() for line in process.stdout if line == "first step\n"]
        _, errors = process.communicate()
    if len(times) != steps + 1:
        sys.exit(f"scripts/bench start: {' '.join(words)} failed:\n{errors}")
    return [after - before for before, after in itertools.pairwise(times)]


def main(arguments: Sequence[str]) -> None:
    options = command.parser("start", __doc__, turns=9).parse_args(arguments)
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        (folder / "ours.py").write_text(OURS)
        (folder / "ddp.py").write_text(DDP)
        ours = str(folder / "ours.py")
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={options.towers}"]
        last = [str(options.towers), name]
        found: dict[str, list[float]] = {"DDP": [], "python": [], "torchrun": [], "restart": []}
        for _ in range(options.turns):
            shutil.rmtree(folder / "run", ignore_errors=True)
            (folder / "failed").unlink(missing_ok=True)
            found["DDP"] += _seconds([*torchrun, str(folder / "ddp.py")])
            found["python"] += _seconds([ours, "0", *last])
            found["torchrun"] += _seconds([*torchrun, ours, "0", *last])
            found["restart"] += _seconds([ours, "1", *last], steps=2)[1:]
    medians = {name: statistics.median(seconds) for name, seconds in found.items()}
    for name, seconds in medians.items():
        print(f"{name:<10}{seconds:>7.2f} s{seconds / medians['DDP']:>8.2f} of DDP")
