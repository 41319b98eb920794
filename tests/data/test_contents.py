"""Towers that load different data from the same script: what FAULTS of other trainers' users do in silence."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import mirrored
from mirrored.data.contents import describe, stable, tower_that_differs
from tests.support.jobs import all_raise, towers

X = torch.arange(64.0).unsqueeze(1)
Y = torch.arange(64)


class OwnOrder(Dataset[Any]):
    """Shuffles its list with a generator that no strategy seeds."""

    def __init__(self, seed: int | None = None) -> None:
        self.order = np.random.default_rng(seed).permutation(64)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return X[self.order[index]], int(self.order[index])


class OwnStream(IterableDataset[Any]):
    """Yields its list in an order of its own."""

    def __init__(self, seed: int | None = None, numbers: bool = True) -> None:
        self.seed, self.numbers = seed, numbers

    def __iter__(self) -> Iterator[Any]:
        for i in np.random.default_rng(self.seed).permutation(64):
            yield (X[i], int(i)) if self.numbers else X[i]


class Noisy(Dataset[Any]):
    """Adds noise from a generator of its own to the inputs of fixed examples."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng()

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return X[index] + float(self.generator.normal()), int(Y[index])


class Words(Dataset[Any]):
    """Texts in the order of a set, whose hash depends on the process."""

    def __init__(self, tower: int) -> None:
        self.words = [f"word {(i * (3 + 2 * tower)) % 64}" for i in range(64)]

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return {"text": self.words[index], "number": index}


def drawn_above(tower: int) -> Any:
    order = torch.randperm(64, generator=torch.Generator().manual_seed(tower))
    return X[order[:48]], Y[order[:48]]


def other_numbers(tower: int) -> Any:
    return (X + tower / 100, Y)


def ready_made(tower: int) -> Any:
    order = list(range(64))
    random.Random(tower).shuffle(order)
    return DataLoader([(X[order[i : i + 8]], Y[order[i : i + 8]]) for i in range(0, 64, 8)], batch_size=None)


DIFFERENT: dict[str, Any] = {
    "a split that was drawn above the strategy": drawn_above,
    "inputs that were drawn above the strategy": other_numbers,
    "a TensorDataset": lambda tower: TensorDataset(*drawn_above(tower)),
    "a subset of it": lambda tower: Subset(TensorDataset(*drawn_above(tower)), range(40)),
    "a list": lambda tower: list(zip(*drawn_above(tower), strict=True)),
    "arrays": lambda tower: {"x": drawn_above(tower)[0].numpy(), "y": drawn_above(tower)[1].numpy()},
    "a dataset that shuffles": lambda tower: OwnOrder(),
    "a loader with worker processes": lambda tower: DataLoader(OwnOrder(), batch_size=8, num_workers=1),
    "texts in the order of a set": Words,
    "a stream that shuffles": lambda tower: OwnStream(),
    "a stream of inputs only": lambda tower: OwnStream(numbers=False),
    "ready-made batches": ready_made,
}


def read(strategy: mirrored.Strategy, name: str) -> None:
    data = DIFFERENT[name](strategy.topology.index)
    for _ in strategy.distribute_dataset(data, None if isinstance(data, DataLoader) else 8):
        pass


FIRST = {"a split that was drawn above the strategy", "a dataset that shuffles", "a stream that shuffles"}


@pytest.mark.parametrize(
    "name", [name if name in FIRST else pytest.param(name, marks=pytest.mark.extended) for name in DIFFERENT]
)
def test_different_data_are_an_error(name: str) -> None:
    words = "tower 1 and tower 0 load different examples in (epoch 0 of a distributed dataset|batch 0 of a stream)"
    all_raise(mirrored.DisagreementError, words, read, name, same=True)


def read_all(strategy: mirrored.Strategy) -> list[int]:
    found: list[int] = []
    rounded = X + 1e-7 * strategy.topology.index  # as another processor rounds
    for data in ((rounded, Y), Noisy(), OwnOrder(3), OwnStream(3), list(zip(rounded, Y, strict=True))):
        seen = torch.zeros(64)
        for _, y in strategy.distribute_dataset(data, 6):
            seen[y] += 1
        found.append(int(strategy.reduce("sum", seen).eq(1).sum()))
    return found


def test_equal_data_and_augmentation_are_not() -> None:
    for count in (2, 3):
        assert towers(read_all, count=count) == [[64] * 5] * count


class Flipped(Dataset[Any]):
    """Negates some inputs, chosen by a generator of its own, so that two loads of an example are often equal."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng()

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return (X[index] + 1) * int(self.generator.choice([1, -1])), int(Y[index])


def read_epochs(strategy: mirrored.Strategy, num_workers: int, epochs: int) -> list[int]:
    """Read 6 of the examples in each epoch. Returns the numbers of the examples of the last one, on all towers."""
    data = strategy.distribute_dataset(Flipped(), 6, num_workers=num_workers, shuffle=True)
    for _ in range(epochs):
        numbers = next(iter(data))[1]
    return sorted(strategy.gather(numbers).tolist())


@pytest.mark.parametrize(("num_workers", "epochs"), [(0, 100), (1, 10)])
def test_an_augmentation_that_is_often_the_same_is_no_difference(num_workers: int, epochs: int) -> None:
    """Without a second look, a hundred epochs pass with a probability of 1e-18, and ten with 0.02."""
    first, second = towers(read_epochs, num_workers, epochs)
    assert first == second
    assert len(set(first)) == 6


def test_only_leaves_that_can_be_repeated_are_compared() -> None:
    assert stable([[2, ["float32", [1], [3.5]], 5], [2, ["float32", [1], [3.5001]], 5]]) == [2, None, 5]
    assert stable([[1, [float("nan")]], [1, [float("nan")]]]) == [1, [pytest.approx(float("nan"), nan_ok=True)]]
    assert stable([[1, "a"], [2, "a", "b"]]) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(3), torch.zeros(4)),
        (torch.zeros(3), torch.zeros(3, dtype=torch.int64)),
        (np.array(["a", "b"]), np.array(["a", "c"])),
        (np.array([1 + 2j]), np.array([1 + 3j])),
        (torch.arange(2_000_000), torch.arange(2_000_000) + 1),
        (b"image", b"other"),
        ({"a": 1}, {"a": 1, "b": 2}),
        (1, 2),
        (float("nan"), 1.0),
    ],
)
def test_kinds_of_examples(one: object, other: object) -> None:
    assert tower_that_differs([describe(one), describe(one)]) is None
    assert tower_that_differs([describe(one), describe(other)]) == 1
