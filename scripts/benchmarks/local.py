"""Time until the digits' network is right on 97 % of the test set, over a slow cable, averaging every step or every k.

Two hosts are network namespaces of this machine with a cable of ``--rate`` Gbit/s between them (this needs root and
iproute2), with one CPU tower each, of one thread. They train ``examples/digits.py``'s network as that does; after every
``--every`` steps, where local towers are equal, all evaluate it, which is not timed. "MB" are what one host has sent.
The ways take turns, each turn with another seed; medians are printed.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import cable
import command
import torch
import torch.nn.functional as F
from torch import Tensor

import mirrored

_RIGHT = 0.97
_EPOCHS = 20  # of the one-cycle schedule, as in the example
_SENT = pathlib.Path("/sys/class/net/eth0/statistics/tx_bytes")
_WAYS: dict[str, Any] = {"every step": None, "LocalSGD": mirrored.LocalSGD, "DiLoCo": mirrored.DiLoCo}


class _Run(NamedTuple):
    """One training: seconds and steps until the network was right, and the megabytes that this host has sent."""

    seconds: float
    steps: int
    megabytes: float


def main(arguments: Sequence[str]) -> None:
    parser = command.parser("local", __doc__, turns=3, towers=None)
    parser.add_argument("--rate", type=float, default=0.1, help="Gbit/s of the cable")
    parser.add_argument("--every", type=int, default=16, help="steps between synchronisations")
    options = parser.parse_args(arguments)
    try:
        with cable.hosts(2, options.rate, 0.0) as places:
            found = _measure(places, options.every, options.turns)
    except cable.CannotPlayError as error:
        sys.exit(f"scripts/bench local: {error}")
    print(f"until {_RIGHT:.0%} of the digits are right, {options.rate:g} Gbit/s, every={options.every}")
    print(f"{'':12}{'seconds':>10}{'steps':>8}{'ms a step':>11}{'MB':>8}{'÷ every step':>14}")
    base = statistics.median(run.seconds for run in found["every step"])
    for way, runs in found.items():
        seconds, steps, megabytes = (statistics.median(column) for column in zip(*runs, strict=True))
        each = statistics.median(run.seconds / run.steps * 1e3 for run in runs)
        print(f"{way:12}{seconds:>10.2f}{steps:>8.0f}{each:>11.1f}{megabytes:>8.1f}{seconds / base:>14.3f}")


def _measure(places: Sequence[tuple[str, str]], every: int, turns: int) -> dict[str, list[_Run]]:
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder, "found.json")
        program = [sys.executable, __file__, str(result), str(every), str(turns)]
        started: list[subprocess.Popen[str]] = []
        try:
            for rank, (namespace, _) in enumerate(places):
                variables = {"RANK": str(rank), "WORLD_SIZE": str(len(places)), "LOCAL_RANK": "0"}
                variables |= {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": places[0][1], "MASTER_PORT": "29400"}
                started.append(cable.start_in(namespace, program, variables | {"OMP_NUM_THREADS": "1"}))
            for process in started:
                if (errors := process.communicate()[1]) and process.returncode:
                    raise RuntimeError(f"a tower has failed: {errors}")
        finally:
            for process in started:
                process.kill()
                process.wait()
        return {way: [_Run(*run) for run in runs] for way, runs in json.loads(result.read_text()).items()}


def _tower() -> None:
    """One tower; tower 0 writes down what it has found."""
    path, every, turns = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    found: dict[str, list[_Run]] = {way: [] for way in _WAYS}
    for seed in range(turns):
        for way, make in _WAYS.items():
            strategy = mirrored.MirroredStrategy(["cpu:0"], synchronize=make and make(every), seed=seed)
            found[way].append(_train(strategy, every))
    if strategy.is_chief:
        pathlib.Path(path).write_text(json.dumps(found))


def _train(strategy: mirrored.Strategy, every: int) -> _Run:
    sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "examples"))
    import digits

    train_set, test_set = digits.load_digits()
    train = strategy.distribute_dataset(train_set, 64, shuffle=True)
    with strategy.scope():
        model = digits.Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=_EPOCHS * len(train))

    def train_step(images: Tensor, labels: Tensor) -> None:
        optimizer.zero_grad()
        mirrored.compute_average_loss(F.cross_entropy(model(images), labels, reduction="none")).backward()
        optimizer.step()
        schedule.step()

    steps, seconds, sent = 0, 0.0, int(_SENT.read_text())
    strategy.barrier()
    started = time.perf_counter()
    for _ in train.epochs(_EPOCHS):
        for batch in train:
            strategy.run(train_step, args=batch)
            steps += 1
            if steps % every == 0:
                seconds += time.perf_counter() - started
                if _right(model, test_set) >= _RIGHT:
                    return _Run(seconds, steps, (int(_SENT.read_text()) - sent) / 1e6)
                strategy.barrier()
                started = time.perf_counter()
    raise RuntimeError(f"never right on {_RIGHT:.0%}")


@torch.no_grad()
def _right(model: torch.nn.Module, test_set: Any) -> float:
    """The share of the test set that the model, which is the same on all towers, is right on."""
    model.eval()
    right = (model(test_set.images).argmax(1) == test_set.labels).float().mean().item()
    model.train()
    return right


if __name__ == "__main__":
    _tower()
