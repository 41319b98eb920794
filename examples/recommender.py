"""Learn who likes which film, with a table of a million rows on parameter servers.

Films and people have a row of the table each. The ratings are made by a rule: tastes lie on a circle, a rating says how
near two of them are, and some of it is chance. A few films and people have most of the ratings.

    python examples/recommender.py                      three workers and two servers on this machine
    python examples/recommender.py --workers 0          one device, the same batches in their order
    python examples/recommender.py --checkpoints DIR    resumes from DIR when it is restarted
"""

from __future__ import annotations

import argparse
import math
import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mirrored
from mirrored.parameter_server.partitioners import MaxSizePartitioner

WIDTH, CHANCE = 16, 0.3


def rate(seed: int, count: int, rows: int) -> tuple[Tensor, Tensor]:
    """Pairs of a film's and a person's row, shape (count, 2), and the ratings, shape (count,), mostly from -1 to 1."""
    random = torch.Generator().manual_seed(seed)
    films = rows // 100
    popular = torch.rand(count, 2, generator=random) ** 6
    pairs = (popular * torch.tensor([films, rows - films])).long() + torch.tensor([0, films])
    tastes = pairs * (math.pi * (1 + math.sqrt(5)))  # golden ratios of the circle, which are spread over it
    return pairs, tastes.diff(dim=1).cos()[:, 0] + CHANCE * torch.randn(count, generator=random)


class Recommender(nn.Module):
    """Says how much people like films."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, WIDTH, sparse=True)  # sparse: workers have the rows that they look up
        nn.init.normal_(self.table.weight, std=0.3)
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, pairs: Tensor) -> Tensor:
        films, people = self.table(pairs).unbind(1)
        return self.head(films * people).squeeze(1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=3, help="0: train on one device, without servers")
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the table")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=500, help="of an epoch")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--checkpoints", metavar="DIR", help="save after each epoch, and go on from there")
    arguments = parser.parse_args()
    rows, steps, size = arguments.rows, arguments.steps, arguments.batch_size

    strategy: mirrored.Strategy
    if arguments.workers:
        strategy = mirrored.ParameterServerStrategy(
            workers=arguments.workers,
            servers=arguments.servers,
            variable_partitioner=MaxSizePartitioner(rows * WIDTH * 4 // arguments.servers),
            seed=0,
        )
        coordinator = mirrored.ClusterCoordinator(strategy)
    else:
        strategy = mirrored.OneDeviceStrategy(seed=0)
    with strategy.scope():
        model = Recommender(rows)
    optimizers = [torch.optim.Adagrad(model.table.parameters(), 0.3), torch.optim.Adam(model.head.parameters(), 0.01)]

    def train_step(number: int) -> float:
        pairs, ratings = rate(number, size, rows)
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = F.mse_loss(model(pairs), ratings)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        return loss.item()

    def train(numbers: range) -> list[float]:
        """Make the steps with these numbers, and return their losses."""
        if not arguments.workers:
            return [train_step(number) for number in numbers]
        losses = [coordinator.schedule(train_step, args=(number,)) for number in numbers]
        coordinator.join()
        return coordinator.fetch(losses)

    progress = {"epochs": 0}
    objects = {"model": model, "table": optimizers[0], "head": optimizers[1], "progress": progress}
    checkpoints = None
    if arguments.checkpoints:
        checkpoints = mirrored.CheckpointManager(strategy, arguments.checkpoints, objects)
        checkpoints.restore_newest()
    test_pairs, test_ratings = rate(2**40, 20_000, rows)
    while progress["epochs"] < arguments.epochs:
        start, first = time.perf_counter(), progress["epochs"] * steps
        losses = train(range(first, first + steps))
        speed = steps / (time.perf_counter() - start)
        progress["epochs"] += 1
        with torch.no_grad():
            test_loss = F.mse_loss(model(test_pairs), test_ratings).item()
        print(
            f"epoch {progress['epochs']}: loss {sum(losses) / steps:.4f}, of held-out ratings {test_loss:.4f} "
            f"(chance alone is {CHANCE**2:.2f}), {speed:.0f} steps/s",
            flush=True,
        )
        if checkpoints is not None:
            checkpoints.steps = progress["epochs"] * steps
            checkpoints.save(wait=True)


if __name__ == "__main__":
    main()
