"""Batches of distributed data, collected."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Sampler

import mirrored


def batches(strategy: mirrored.Strategy, *args: object, **options: object) -> list[list[int]]:
    return [batch.tolist() for batch in strategy.distribute_dataset(*args, **options)]


class Augmented(Dataset[Tensor]):
    """Every example draws from all three generators."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, random.random(), np.random.rand(), float(torch.rand(()))], dtype=torch.float64)


class Streamed(IterableDataset[Any]):
    """The examples of something that can be iterated again and again, without their number."""

    def __init__(self, examples: Iterable[Any]) -> None:
        self.examples = examples

    def __iter__(self) -> Iterator[Any]:
        return iter(self.examples)


class Stream(IterableDataset[Tensor]):
    """A shuffled stream of augmented examples; reshuffles by torch's own generator."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[Tensor]:
        for i in torch.randperm(self.length).tolist():
            yield torch.tensor([float(i), float(torch.rand(()))])


class Listed(Sampler[int]):
    def __init__(self, indices: list[int]) -> None:
        self.indices = indices

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)
