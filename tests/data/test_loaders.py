"""DataLoaders: their settings, samplers, generators and workers are kept, and batches are copied ahead."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

import mirrored
from mirrored.data import dataset as datasets
from mirrored.data.distribute import distribute
from mirrored.events import Events
from mirrored.shares import Cut, Distribution, KnownShares, Share
from tests.support.datasets import Listed, Stream, batches
from tests.support.jobs import all_raise, towers
from towers.collectives.communicator import Alone

ROWS = torch.arange(12).view(3, 4)
ORDERED = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
LOADERS: dict[str, tuple[Callable[[Dataset[Any]], DataLoader[Any]], list[list[int]] | None]] = {
    "plain": (lambda d: DataLoader(d, 4), ORDERED),
    "shuffled": (lambda d: DataLoader(d, 4, shuffle=True), None),
    "workers": (lambda d: DataLoader(d, 4, num_workers=1, prefetch_factor=3, persistent_workers=True), ORDERED),
    "collate": (lambda d: DataLoader(d, 4, collate_fn=add_100), [[100 + i for i in batch] for batch in ORDERED]),
    "weighted": (lambda d: DataLoader(d, 4, sampler=WeightedRandomSampler([1.0] * 10, 8)), None),
    "batch sampler": (
        lambda d: DataLoader(d, batch_sampler=BatchSampler(SequentialSampler(d), 3, drop_last=True)),
        [[0, 1, 2], [3, 4, 5], [6, 7, 8]],
    ),
    "random batch sampler": (
        lambda d: DataLoader(d, batch_sampler=BatchSampler(RandomSampler(d), 3, drop_last=False)),
        None,
    ),
    "no batches": (lambda _: DataLoader(ROWS, batch_size=None), ROWS.tolist()),
}
"""Loaders, and the batches of each epoch where the order is not random."""


def add_100(rows: list[tuple[Tensor]]) -> Tensor:
    return torch.stack([row[0] for row in rows]) + 100


def from_loaders(strategy: mirrored.Strategy, kind: str) -> list[object]:
    make, _ = LOADERS[kind]
    data = strategy.distribute_dataset(make(TensorDataset(torch.arange(10))))
    epochs = [
        [strategy.gather(batch[0] if isinstance(batch, list) else batch).tolist() for batch in data] for _ in range(2)
    ]
    return [len(data), *epochs]


@pytest.mark.parametrize("kind", LOADERS)
def test_data_loaders(kind: str) -> None:
    length, first, second = expected = from_loaders(mirrored.OneDeviceStrategy(), kind)
    assert towers(from_loaders, kind) == [expected] * 2
    assert towers(from_loaders, kind, count=3) == [expected] * 3
    assert length == len(first) == len(second)
    if (batches_of_each := LOADERS[kind][1]) is not None:
        assert first == second == batches_of_each
    else:
        assert first != second
        if kind != "weighted":
            assert sorted(chain.from_iterable(first)) == list(range(10))


def test_a_loaders_settings_are_kept() -> None:
    def first_worker(_: int) -> None:
        pass

    given_loader = DataLoader(
        range(8),
        2,
        num_workers=2,
        prefetch_factor=5,
        persistent_workers=True,
        timeout=17,
        worker_init_fn=first_worker,
        multiprocessing_context="fork",
    )
    loader = mirrored.OneDeviceStrategy().distribute_dataset(given_loader)._loader
    for name in ("num_workers", "prefetch_factor", "persistent_workers", "timeout", "worker_init_fn", "pin_memory"):
        assert getattr(loader, name) == getattr(given_loader, name)
    assert loader.multiprocessing_context.get_start_method() == "fork"


def test_data_that_lies_on_a_gpu_is_not_pinned() -> None:
    """A loader of the main process would pin whatever the dataset gives."""
    comm = Alone(torch.device("cuda", 0))
    for dataset in (range(8), Stream(8)):
        for workers in (0, 2):
            data: Any = distribute(
                Distribution(comm, Cut(1, 0, 1), KnownShares(), Events(comm.health)),
                dataset,
                4,
                shuffle=False,
                drop_last=False,
                seed=0,
                default_seed=0,
                collate_fn=None,
                num_workers=workers,
                stand_in=False,
                batch_dims=None,
            )
            assert data._loader.pin_memory == (workers > 0)


def test_batches_are_copied_ahead_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is enqueued, with a device and streams that are none."""
    done: list[object] = []

    class Side:
        def __init__(self, device: torch.device) -> None:
            done.append("a stream")

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            pass

        def record_event(self) -> int:
            done.append("copied")
            return done.count("copied")

    class Model:
        def wait_event(self, event: int) -> None:
            done.append(event)

    monkeypatch.setattr(torch, "Stream", Side)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: Model())
    monkeypatch.setattr(Tensor, "record_stream", lambda self, stream: done.append(tuple(self.shape)))
    monkeypatch.setattr(datasets, "pinned", lambda tensor: done.append("pinned") or tensor)
    device = torch.device("meta")
    sparse = torch.eye(3).to_sparse()
    packed = pack_sequence([torch.ones(2), torch.ones(1)])
    batches = [torch.ones(1), {"packed": packed}, (sparse, torch.ones(3, device=device), "word")]
    for _ in range(2):
        found = list(datasets.to_device(iter([(batch, Share(1, 1)) for batch in batches]), device))
    first, second, third = (batch for batch, _ in found)
    assert first.device == second["packed"].data.device == third[0].device == third[1].device == device
    assert second["packed"].batch_sizes.device == torch.device("cpu")
    assert third[0].layout == torch.sparse_coo
    assert done[:9] == ["a stream", "pinned", "copied", "copied", 1, (1,), "copied", 2, (3,)]
    assert done[9:11] == [3, (3,)]
    assert done.count("a stream") == 1


def test_a_distributed_stream_does_not_keep_its_loader() -> None:
    """Keras' fit finds it by the script's loader, which is to be freed when the script drops it."""
    loader = DataLoader(Stream(4), batch_size=2)
    reference = weakref.ref(loader)
    data = mirrored.OneDeviceStrategy().distribute_dataset(loader)
    del loader
    gc.collect()
    assert reference() is None
    assert len(list(data)) == 2


class Shuffled(IterableDataset[int]):
    """A stream that draws its order from the global generator, as a shuffle buffer does."""

    def __iter__(self) -> Iterator[int]:
        for _ in range(3):
            yield from torch.randperm(3).tolist()


def with_noise(examples: list[int]) -> Tensor:
    """Collates to (number, noise); how much noise is drawn depends on the share."""
    return torch.stack([torch.tensor(examples, dtype=torch.float64), torch.rand(len(examples), dtype=torch.float64)], 1)


def collate_with_noise(strategy: mirrored.Strategy, kind: str, workers: int) -> list[list[float]]:
    data = Shuffled() if kind == "stream" else list(range(9))
    distributed = strategy.distribute_dataset(data, 3, collate_fn=with_noise, num_workers=workers)
    torch.manual_seed(5)
    joined = [strategy.gather(batch) for batch in distributed]
    return [*torch.cat(joined).T.tolist(), torch.rand(1).tolist()]


@pytest.mark.parametrize("kind", ["stream", "indexed"])
@pytest.mark.parametrize("workers", [0, 1])
def test_what_collating_draws_is_kept_apart(kind: str, workers: int) -> None:
    """From the stream's own numbers, from the model's, and from the other towers'."""
    for numbers, noise, after in towers(collate_with_noise, kind, workers):
        assert sorted(numbers[:3]) == sorted(numbers[3:6]) == sorted(numbers[6:]) == [0, 1, 2] or kind == "indexed"
        assert sorted(numbers) == sorted([0, 1, 2] * 3 if kind == "stream" else range(9))
        assert len(set(noise)) == 9
        assert after == torch.rand(1, generator=torch.Generator().manual_seed(5)).tolist()


class CountsUp(Dataset[int]):
    """Changes between epochs, as a curriculum does."""

    def __init__(self) -> None:
        self.offset = 0

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        return index + self.offset


def test_loader_workers_see_changes_of_the_dataset() -> None:
    dataset = CountsUp()
    data = mirrored.OneDeviceStrategy().distribute_dataset(dataset, 2, num_workers=1)
    found = []
    for dataset.offset in (0, 10):
        found += [batch.tolist() for batch in data]
    assert found == [[0, 1], [10, 11]]


class Backwards(RandomSampler):
    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.data_source))[::-1])  # type: ignore[arg-type]


def test_a_loaders_own_sampler_is_kept() -> None:
    one = mirrored.OneDeviceStrategy()
    assert batches(one, DataLoader(range(4), 2, sampler=Backwards(range(4)))) == [[3, 2], [1, 0]]  # type: ignore[arg-type]
    assert batches(one, DataLoader(range(10), 2, sampler=SequentialSampler(range(3)))) == [[0, 1], [2]]  # type: ignore[arg-type]
    never_ending = DataLoader(torch.arange(8).view(4, 2), batch_size=None, sampler=itertools.cycle([1, 0]))  # type: ignore[arg-type]
    found = itertools.islice(one.distribute_dataset(never_ending), 3)
    assert [batch.tolist() for batch in found] == [[2, 3], [0, 1], [2, 3]]
    endless = DataLoader(range(4), 2, sampler=(i for i in (2, 0, 1)))  # type: ignore[arg-type, var-annotated]
    assert batches(one, endless) == [[2, 0], [1]]


def own_generator(strategy: mirrored.Strategy, kind: str) -> None:
    """Orders that each tower draws from numbers of its own."""
    own = np.random.default_rng(strategy.topology.index)
    drawn = own.permutation(9).tolist()
    rows = torch.arange(18).view(9, 2)
    args: dict[str, Any] = {
        "sampler": (DataLoader(range(9), 4, sampler=Listed(drawn)),),
        "batches": (DataLoader(range(9), batch_sampler=[drawn[:3], drawn[3:]]),),
        "subset": (Subset(Subset(range(9), drawn), range(8)), 4),
        "joined": (ConcatDataset([Subset(range(9), drawn[:5])]), 4),
        "no batches": (DataLoader(rows, batch_size=None, sampler=Listed(drawn)),),
    }
    list(strategy.distribute_dataset(*args[kind], shuffle=kind == "subset"))


@pytest.mark.parametrize("kind", ["sampler", "batches", "subset", "joined", "no batches"])
def test_towers_that_draw_other_orders_are_refused(kind: str) -> None:
    all_raise(mirrored.DisagreementError, "different orders of the examples.*on tower 1", own_generator, kind)


class Once(Listed):
    """Counts how often it is drawn from."""

    draws = 0

    def __iter__(self) -> Iterator[int]:
        self.draws += 1
        return iter(self.indices)


def draws(strategy: mirrored.Strategy) -> int:
    sampler = Once([2, 0, 1])
    data = strategy.distribute_dataset(DataLoader(range(3), 2, sampler=sampler))
    list(data)
    data.state_dict()
    return sampler.draws


def test_an_order_is_drawn_once() -> None:
    assert [draws(mirrored.OneDeviceStrategy()), *towers(draws)] == [1, 1, 1]


def seeded(strategy: mirrored.Strategy, kind: str, seed: int) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    if kind == "loader":
        return batches(strategy, DataLoader(range(8), 8, shuffle=True, generator=g))
    if kind == "stream":
        loader = DataLoader(Stream(8), 8, generator=g)
        return [[int(row[0]) for row in batch] for batch in strategy.distribute_dataset(loader)]
    return batches(strategy, DataLoader(range(8), 8, sampler=WeightedRandomSampler([1.0] * 8, 8, generator=g)))


@pytest.mark.parametrize("kind", ["loader", "stream", "sampler"])
def test_a_loaders_generator_seeds_its_order(kind: str) -> None:
    one = mirrored.OneDeviceStrategy()
    assert seeded(one, kind, 1) == seeded(one, kind, 1) != seeded(one, kind, 2)
    g = torch.Generator().manual_seed(1)
    weighted = DataLoader(range(8), 8, sampler=WeightedRandomSampler([1.0] * 8, 8, generator=g))
    assert batches(one, weighted) == batches(one, weighted), "it keeps its seed"
    g = torch.Generator().manual_seed(1)
    loader = DataLoader(range(8), 8, shuffle=True, generator=g)
    assert batches(one, loader, seed=2) == batches(one, range(8), 8, shuffle=True, seed=2), "seed= comes first"


class Stops(Dataset[torch.Tensor]):
    """Raises StopIteration for an example."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 9:
            raise StopIteration
        return torch.tensor(float(index))


def _stopping(strategy: mirrored.Strategy, workers: int) -> int:
    return len(list(strategy.distribute_dataset(Stops(), 4, num_workers=workers)))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_raises_stop_iteration_is_an_error(workers: int) -> None:
    words = "the dataset raised StopIteration for example 9"
    for count in (1, 2):
        with pytest.raises(mirrored.TowerFailedError, match=words):
            towers(_stopping, workers, count=count)
