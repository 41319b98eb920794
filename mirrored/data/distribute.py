"""From whatever holds a user's data to a distributed dataset."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, default_collate

from mirrored.data.dataset import DistributedDataset, MapDataset
from mirrored.data.order import Order, is_plain
from mirrored.data.shares import Cut, KnownShares
from mirrored.data.streams import StreamDataset, settings_of
from towers.collectives.communicator import Communicator
from towers.log import get_logger

log = get_logger("mirrored")


def distribute(
    comm: Communicator,
    cut: Cut,
    known: KnownShares,
    dataset: Any,
    global_batch_size: int | None,
    *,
    shuffle: bool,
    drop_last: bool,
    seed: int,
    collate_fn: Callable[[list[Any]], Any] | None,
    num_workers: int,
) -> DistributedDataset:
    """See ``Strategy.distribute_dataset``."""
    if isinstance(dataset, DataLoader):
        if shuffle or drop_last or collate_fn is not None or num_workers:
            raise ValueError(
                "shuffle, drop_last, collate_fn and num_workers belong to the DataLoader that was given; set them there"
            )
        return _from_loader(comm, cut, known, dataset, global_batch_size, seed)
    _check_batch_size(global_batch_size)
    assert global_batch_size is not None
    # By a thread of the loader's, where there are workers; else when the batch is copied. What comes from workers lies
    # on the CPU, while a dataset in the main process may give tensors of the GPU, which cannot be pinned.
    pinned = comm.device.type == "cuda" and num_workers > 0
    if isinstance(dataset, IterableDataset):
        if shuffle:
            raise ValueError("an IterableDataset has an order of its own: shuffle inside it")
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=global_batch_size,
            drop_last=drop_last,
            collate_fn=collate_fn,
            num_workers=num_workers,
            pin_memory=pinned,
        )
        return _from_loader(comm, cut, known, loader, None, seed)
    if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise TypeError(
            f"a {type(dataset).__name__} cannot be distributed: it has no __getitem__ and __len__, and is no "
            "IterableDataset; for a generator use distribute_datasets_from_function"
        )
    order = Order(len(dataset), global_batch_size, shuffle=shuffle, drop_last=drop_last, seed=seed)
    _say_if_small(comm, global_batch_size)
    settings: dict[str, object] = {
        "examples": len(dataset),
        "global_batch_size": global_batch_size,
        "shuffle": shuffle,
        "drop_last": drop_last,
        "seed": seed,
    }
    loading = {
        "collate_fn": collate_fn or default_collate,
        "num_workers": num_workers,
        "pin_memory": pinned,
    }
    return MapDataset(comm, cut, known, dataset, order, settings, loading)


def _from_loader(
    comm: Communicator, cut: Cut, known: KnownShares, loader: DataLoader[Any], global_batch_size: int | None, seed: int
) -> DistributedDataset:
    size = loader.batch_size
    if global_batch_size is not None and global_batch_size != size:
        raise ValueError(
            f"global_batch_size is {global_batch_size}, but the DataLoader's batch_size, which is the global one, "
            f"is {size}; leave global_batch_size out"
        )
    if any(isinstance(s, DistributedSampler) for s in (loader.sampler, getattr(loader.batch_sampler, "sampler", None))):
        raise ValueError(
            "the DataLoader has a DistributedSampler, so its data would be shared out twice: give "
            "distribute_dataset a DataLoader with the global batch size and without that sampler"
        )
    settings: dict[str, object] = {"batch_size": size, "drop_last": loader.drop_last, "seed": seed}
    if isinstance(loader.dataset, IterableDataset) or (size is None and loader.batch_sampler is None):
        return StreamDataset(comm, cut, known, loader, seed, settings)
    own_batches = size is None  # the user's own batch_sampler
    own_order = not own_batches and not is_plain(loader.sampler, loader.dataset)
    order = Order(
        len(loader.dataset),  # type: ignore[arg-type]
        size or 1,
        shuffle=isinstance(loader.sampler, RandomSampler),
        drop_last=loader.drop_last,
        seed=seed,
        sampler=loader.sampler if own_order else None,
        batch_sampler=loader.batch_sampler if own_batches else None,
    )
    if size is not None:
        _say_if_small(comm, size)
    settings |= {"examples": len(loader.dataset)}  # type: ignore[arg-type]
    with contextlib.suppress(TypeError):  # a sampler without a length
        settings["steps"] = len(order)
    loading = settings_of(loader) | {"collate_fn": loader.collate_fn or default_collate}
    return MapDataset(comm, cut, known, loader.dataset, order, settings, loading)


def _check_batch_size(size: object) -> None:
    if size is None:
        raise ValueError("global_batch_size is missing: how many examples all towers together take in a step")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"global_batch_size is {size!r}, but must be a whole number from 1")


def _say_if_small(comm: Communicator, size: int) -> None:
    if size < comm.size and comm.index == 0:
        log.info(
            "the global batch of %d is smaller than the %d towers: %d of them have nothing to do in each step",
            size,
            comm.size,
            comm.size - size,
        )
