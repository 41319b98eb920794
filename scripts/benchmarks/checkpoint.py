"""What saving costs: the steps beside which a checkpoint is written, and a save against writing the same bytes plainly.

CPU towers train a model of 100 MB in turns of twenty steps, without saving and with an asynchronous save at the
beginning. Then one tower saves synchronously, in turns with one ``write`` and ``fsync`` of as many bytes. Ratios are
medians over the turns, each of which compares neighbours in time.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from steps import Times, row
from torch import nn

import mirrored


def _model(megabytes: int) -> nn.Module:
    """Four layers of ``megabytes`` MB together."""
    width = round((megabytes * 1e6 / 4 / 4) ** 0.5)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(4)))


def _asynchronous(folder: str, turns: int, megabytes: int, batch: int) -> tuple[Times, float, list[float]]:
    """Seconds of twenty steps without and with a save, seconds that saves held training up, and that writing took."""
    strategy = mirrored.MirroredStrategy(seed=0)
    with strategy.scope():
        model = _model(megabytes)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(batch // strategy.num_replicas_in_sync, next(model.parameters()).shape[1])
    checkpoints = mirrored.CheckpointManager(strategy, folder, {"model": model, "optimizer": optimizer})

    def train_step() -> None:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x, reduction="none").mean(1)
        mirrored.compute_average_loss(loss, global_batch_size=batch).backward()
        optimizer.step()

    times: Times = {"never": [], "saved": []}
    writing: list[float] = []
    for turn in range(-1, turns):
        for name in ("never", "saved") if turn % 2 else ("saved", "never"):
            strategy.communicator.barrier()
            started = time.perf_counter()
            for step in range(20):
                if name == "saved" and step == 0:
                    checkpoints.save()
                strategy.run(train_step)
                checkpoints.steps += 1
            strategy.communicator.barrier()
            if turn >= 0:
                times[name].append(time.perf_counter() - started)
            checkpoints.wait()
            if name == "saved" and turn >= 0:
                writing.append(checkpoints.written_seconds)
    return times, checkpoints.stalled_seconds / (turns + 1), writing


def _synchronous(folder: str, turns: int, megabytes: int) -> Times:
    """Seconds of a save, and of writing as many bytes to a file of their own."""
    strategy = mirrored.OneDeviceStrategy()
    checkpoints = mirrored.CheckpointManager(strategy, folder, {"model": _model(megabytes)})
    data = os.urandom(megabytes * 10**6)
    times: Times = {"save": [], "plain": []}
    for turn in range(-1, turns):
        for name in ("save", "plain") if turn % 2 else ("plain", "save"):
            os.sync()
            started = time.perf_counter()
            if name == "save":
                checkpoints.steps += 1
                checkpoints.save(wait=True)
            else:
                _write(pathlib.Path(folder, f"plain{turn}"), data)
                pathlib.Path(folder, f"plain{turn - 2}").unlink(missing_ok=True)
            if turn >= 0:
                times[name].append(time.perf_counter() - started)
    return times


def _write(path: pathlib.Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.fsync(descriptor)
    os.close(descriptor)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench checkpoint", description=__doc__)
    parser.add_argument("--towers", type=int, default=2)
    parser.add_argument("--turns", type=int, default=9, help="alternations")
    parser.add_argument("--megabytes", type=int, default=100, help="of the model")
    parser.add_argument("--batch", type=int, default=64, help="examples of all towers together")
    parser.add_argument("--folder", help="where to write; default: a temporary one")
    options = parser.parse_args(arguments)
    print(
        f"torch {torch.version.__version__}; a model of {options.megabytes} MB; medians of {options.turns} alternations"
    )
    print(f"{'':<44}{'this, ms':>9}{'that, ms':>9}{'ratio':>9}{'25 %':>9}{'75 %':>8}")
    names = [f"cpu:{i}" for i in range(options.towers)]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        call = (os.path.join(folder, "a"), options.turns, options.megabytes, options.batch)
        times, stalled, writing = mirrored.launch(_asynchronous, call, devices=names)[0]
        print(row("20 steps, with an asynchronous save ÷ without", times["saved"], times["never"]))
        print(f"  held up {stalled * 1e3:.0f} ms a save; written in {statistics.median(writing) * 1e3:.0f} ms beside")
        times = _synchronous(os.path.join(folder, "b"), options.turns, options.megabytes)
        print(row("synchronous save ÷ write and fsync", times["save"], times["plain"]))
