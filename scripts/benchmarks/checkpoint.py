"""What saving costs: the steps beside which a checkpoint is written, and a save against writing the same bytes plainly.

CPU towers train a model of 100 MB in turns of twenty steps, without saving and with an asynchronous save at the
beginning. Then one tower saves synchronously, in turns with one ``write`` and ``fsync`` of as many bytes. Ratios are
medians over the turns, each of which compares neighbours in time.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import statistics
import tempfile
from collections.abc import Sequence

import command
import steps
import torch
import torch.nn.functional as F
from steps import Times
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

    writing: list[float] = []

    def twenty() -> None:
        for _ in range(20):
            strategy.run(train_step)
            checkpoints.steps += 1

    def saved() -> None:
        checkpoints.save()
        twenty()

    def wait_for_files() -> None:
        checkpoints.wait()
        writing.append(checkpoints.written_seconds)

    times = steps.alternate({"never": twenty, "saved": saved}, turns, 0, wait_for_files)
    checkpoints.wait()
    return times, checkpoints.stalled_seconds / (turns + 1), writing


def _synchronous(folder: str, turns: int, megabytes: int) -> Times:
    """Seconds of a save, and of writing as many bytes to a file of their own."""
    strategy = mirrored.OneDeviceStrategy()
    checkpoints = mirrored.CheckpointManager(strategy, folder, {"model": _model(megabytes)})
    data = os.urandom(megabytes * 10**6)
    numbers = itertools.count()

    def save() -> None:
        checkpoints.steps += 1
        checkpoints.save(wait=True)

    def plain() -> None:
        number = next(numbers)
        _write(pathlib.Path(folder, f"plain{number}"), data)
        pathlib.Path(folder, f"plain{number - 2}").unlink(missing_ok=True)

    return steps.alternate({"save": save, "plain": plain}, turns, 0, os.sync)


def _write(path: pathlib.Path, data: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
    os.fsync(descriptor)
    os.close(descriptor)


def main(arguments: Sequence[str]) -> None:
    parser = command.parser("checkpoint", __doc__, turns=9)
    parser.add_argument("--megabytes", type=int, default=100, help="of the model")
    parser.add_argument("--batch", type=int, default=64, help="examples of all towers together")
    parser.add_argument("--folder", help="where to write; default: a temporary one")
    options = parser.parse_args(arguments)
    steps.print_head(f"a model of {options.megabytes} MB; medians of {options.turns} alternations")
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        call = (os.path.join(folder, "a"), options.turns, options.megabytes, options.batch)
        times, stalled, writing = mirrored.launch(_asynchronous, call, devices=command.cpus(options.towers))[0]
        steps.print_row("20 steps, with an asynchronous save ÷ without", times["saved"], times["never"])
        print(f"  held up {stalled * 1e3:.0f} ms a save; written in {statistics.median(writing) * 1e3:.0f} ms beside")
        times = _synchronous(os.path.join(folder, "b"), options.turns, options.megabytes)
        steps.print_row("synchronous save ÷ write and fsync", times["save"], times["plain"])
