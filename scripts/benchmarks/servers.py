"""Updates per second with parameter servers, by the number of workers: a table of which a batch uses few rows.

An update is a scheduled step: the worker pulls rows and the dense layers, computes gradients and pushes them to two
servers, which step with Adagrad. Each worker looks up two rows for each of 1,024 examples. Turns alternate between the
numbers of workers.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import command
import torch
from torch import nn

import mirrored
from mirrored.parameter_server.partitioners import MaxSizePartitioner


def _training(workers: int, rows: int, size: int) -> Callable[[int], float]:
    """A function that makes a number of updates and returns how many of them there were in a second."""
    strategy: mirrored.Strategy
    if workers:
        strategy = mirrored.ParameterServerStrategy(
            workers=workers, servers=2, variable_partitioner=MaxSizePartitioner(rows * 32), seed=0
        )
        coordinator = mirrored.ClusterCoordinator(strategy)
    else:
        strategy = mirrored.OneDeviceStrategy(seed=0)
    with strategy.scope():
        model = nn.Sequential(nn.EmbeddingBag(rows, 16, sparse=True), nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)

    def train_step(seed: int) -> None:
        words = torch.randint(rows, (size, 2), generator=torch.Generator().manual_seed(seed))
        optimizer.zero_grad()
        model(words).square().mean().backward()
        optimizer.step()

    def measure(updates: int) -> float:
        start = time.perf_counter()
        for number in range(updates):
            coordinator.schedule(train_step, args=(number,)) if workers else train_step(number)
        if workers:
            coordinator.join()
        return updates / (time.perf_counter() - start)

    measure(60)
    return measure


def main(arguments: Sequence[str]) -> None:
    parser = command.parser("servers", __doc__, turns=9, towers=None)
    parser.add_argument("--workers", type=command.names, default="0,1,2,3", help="0: one device, no servers")
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the table, which is 16 wide")
    parser.add_argument("--batch", type=int, default=1024, help="examples of an update")
    parser.add_argument("--updates", type=int, default=200, help="of a turn")
    options = parser.parse_args(arguments)
    print(
        f"torch {torch.version.__version__}; {options.rows} rows × 16, 2 servers, {options.updates} updates a turn; "
        f"medians of {options.turns} turns"
    )
    trainings = {int(workers): _training(int(workers), options.rows, options.batch) for workers in options.workers}
    speeds: dict[int, list[float]] = {workers: [] for workers in trainings}
    for _ in range(options.turns):
        for workers, measure in trainings.items():
            speeds[workers].append(measure(options.updates))
    for workers, found in speeds.items():
        low, middle, high = statistics.quantiles(found, n=4)
        print(f"{workers or 'no'} workers: {middle:.0f} updates/s (quartiles {low:.0f} and {high:.0f})")
