"""Samplers that are too long to be read at once, or never end; and what scripts read from a distributed loader."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, Sampler, TensorDataset

import mirrored
from tests.support.jobs import all_raise, towers

DATA = TensorDataset(torch.arange(100))


class Endless(Sampler[int]):
    """Draws forever, from the global generators."""

    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(torch.randint(100, ()))


class EndlessBatches(Sampler[list[int]]):
    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[list[int]]:
        for i in itertools.count():
            yield [i % 100, (i + 1) % 100, (i + 2) % 100]


def loaders(kind: str, seed: int | None = None) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed) if seed is not None else None
    if kind == "long":
        sampler = RandomSampler(DATA, replacement=True, num_samples=10**10, generator=generator)
        return DataLoader(DATA, batch_size=5, sampler=sampler, num_workers=0)
    if kind == "long, loaded by processes":
        return DataLoader(DATA, batch_size=5, sampler=RandomSampler(DATA, True, 10**10), num_workers=1)
    return (
        DataLoader(DATA, batch_size=5, sampler=Endless())
        if kind == "endless"
        else DataLoader(DATA, batch_sampler=EndlessBatches())
    )


def read(strategy: mirrored.Strategy, kind: str) -> tuple[list[list[int]], list[list[int]], list[float]]:
    """The global batches of two epochs' first steps; and what the script draws meanwhile."""
    data = strategy.distribute_dataset(loaders(kind))
    epochs, drawn = [], []
    for _ in range(2):
        steps = []
        for (x,) in itertools.islice(data, 250):  # more indices than are drawn at once
            steps.append(strategy.gather(x).tolist())
            drawn.append(float(torch.rand(())))
        epochs.append(steps)
    return epochs[0], epochs[1], drawn


@pytest.mark.parametrize(
    "kind",
    [
        "long",
        *(pytest.param(kind, marks=pytest.mark.extended) for kind in ("long, loaded by processes", "endless")),
        "endless batches",
    ],
)
def test_indices_are_drawn_as_they_are_needed(kind: str) -> None:
    ((first, second, drawn),) = towers(read, kind, count=1)
    for found in towers(read, kind):
        assert found == (first, second, drawn)
    assert (first != second) == ("batches" not in kind)
    assert len(drawn) == len(set(drawn)) == 500


def differ(strategy: mirrored.Strategy) -> None:
    next(iter(strategy.distribute_dataset(DataLoader(DATA, batch_size=5, sampler=Own(strategy.topology.index)))))


class Restarting(Sampler[int]):
    """Starts again when it is asked after its end, as a wrapper of Lightning does."""

    def __init__(self) -> None:
        self.position = 0

    def __len__(self) -> int:
        return 100

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.position = self.position + 1 if self.position <= 100 else 1
        if self.position > 100:
            raise StopIteration
        return self.position - 1


def test_a_sampler_that_starts_again_ends() -> None:
    strategy = mirrored.OneDeviceStrategy()
    data = strategy.distribute_dataset(DataLoader(DATA, batch_size=30, sampler=Restarting()))
    for _ in range(2):
        assert torch.cat([x for (x,) in data]).tolist() == list(range(100))


class Own(Endless):
    """Draws from a generator of its own."""

    def __init__(self, seed: int) -> None:
        self.own = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(torch.randint(100, (), generator=self.own))


def test_orders_that_differ_are_an_error() -> None:
    all_raise(mirrored.DisagreementError, "with different orders of the examples", differ, same=True)


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(7)


def test_what_scripts_read_from_a_loader() -> None:
    strategy = mirrored.OneDeviceStrategy()
    for data, size in ((DATA, 8), (Numbers(), 3)):
        distributed = strategy.distribute_dataset(data, size)
        assert distributed.dataset is data
        assert distributed.batch_size == size
    loader = DataLoader(DATA, batch_size=4)
    assert len(strategy.distribute_dataset(loader).dataset) == len(loader.dataset)
    assert strategy.distribute_datasets_from_function(lambda _: loader).dataset is None


def flat(strategy: mirrored.Strategy) -> list[int]:
    batches = [(torch.arange(12).view(3, 4), torch.arange(4)) for _ in range(2)]
    data = strategy.distribute_dataset(DataLoader(batches, batch_size=None), batch_dims=(1, 0))
    return [x.view(-1).numel() for x, _ in data]


def test_a_share_along_another_dimension_is_contiguous() -> None:
    assert towers(flat) == [[6, 6]] * 2
