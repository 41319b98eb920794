"""A small training with parameter servers, for the tests beside it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mirrored
from mirrored.parameter_server.partitioners import FixedShardsPartitioner


class Words(nn.Module):
    """A regression on bags of words, with statistics of BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(50, 4, sparse=True)
        self.dense = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 1))

    def forward(self, words: Tensor) -> Tensor:
        return self.dense(self.table(words)).squeeze(1)


def examples(seed: int, count: int = 8) -> tuple[Tensor, Tensor]:
    words = torch.randint(50, (count, 3), generator=torch.Generator().manual_seed(seed))
    return words, (words.sum(1) % 5).float()


class Training:
    """A model on servers, and what is scheduled."""

    def __init__(self, workers: int = 2, **options: Any) -> None:
        options = {"servers": 2, "variable_partitioner": FixedShardsPartitioner(2), "seed": 0, **options}
        self.strategy = mirrored.ParameterServerStrategy(workers=workers, **options)
        with self.strategy.scope():
            model = self.model = Words()
        adam = self.adam = torch.optim.Adam(model.dense.parameters(), 0.02)
        adagrad = self.adagrad = torch.optim.Adagrad(model.table.parameters(), 0.1)
        self.coordinator = mirrored.ClusterCoordinator(self.strategy)

        def data(context: mirrored.InputContext) -> Iterator[tuple[Tensor, Tensor]]:
            number = context.input_pipeline_id
            while True:
                yield examples(number)
                number += context.num_input_pipelines

        def step(batches: Iterator[tuple[Tensor, Tensor]]) -> float:
            words, y = next(batches)
            adam.zero_grad()
            adagrad.zero_grad()
            loss = F.mse_loss(model(words), y)
            loss.backward()
            adam.step()
            adagrad.step()
            return loss.item()

        self.step, self.batches = step, iter(self.coordinator.create_per_worker_dataset(data))

    def train(self, steps: int) -> list[float]:
        values = [self.coordinator.schedule(self.step, args=(self.batches,)) for _ in range(steps)]
        self.coordinator.join()
        return self.coordinator.fetch(values)
