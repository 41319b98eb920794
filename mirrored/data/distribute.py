"""Creates distributed datasets from datasets, loaders, iterables, tensors and functions."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler

from mirrored.data.dataset import DistributedDataset, MapDataset
from mirrored.data.examples import Slices, as_slices, refuse_columns
from mirrored.data.order import Order, is_plain, is_ready_made
from mirrored.shares import Distribution
from towers.system.messages import get_logger

if TYPE_CHECKING:
    from mirrored.data.batch_dims import Dims

log = get_logger("mirrored")


@dataclass(frozen=True)
class InputContext:
    """The argument of the function of ``distribute_datasets_from_function``, which is called once on each tower.

    Attributes:
        num_input_pipelines: the number of pipelines, one per tower.
        input_pipeline_id: this pipeline's index.
        num_replicas_in_sync: the number of towers that train together.
    """

    num_input_pipelines: int
    input_pipeline_id: int
    num_replicas_in_sync: int

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the batch size of each tower.

        Raises:
            ValueError: ``global_batch_size`` is not divisible by the number of towers.
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise ValueError(
                f"the global batch size {global_batch_size} is not divisible by the {self.num_replicas_in_sync} "
                "towers; use distribute_dataset, which supports uneven shares"
            )
        return global_batch_size // self.num_replicas_in_sync


@dataclass(frozen=True)
class ValueContext:
    """The argument of the function of ``distribute_values_from_function``, which is called once on each tower."""

    replica_id_in_sync_group: int
    num_replicas_in_sync: int


def distribute(
    distribution: Distribution,
    dataset: Any,
    global_batch_size: int | None,
    *,
    shuffle: bool,
    drop_last: bool,
    seed: int | None,
    default_seed: int,
    collate_fn: Callable[[list[Any]], Any] | None,
    num_workers: int,
    stand_in: bool,
    batch_dims: Dims,
) -> DistributedDataset:
    """Creates the distributed dataset for ``Strategy.distribute_dataset``, which describes the other arguments.

    Args:
        default_seed: the seed if neither ``seed`` nor a generator of the loader determines it.
    """
    distribution = distribution.of_dataset(stand_in)
    if batch_dims is not None and not (isinstance(dataset, DataLoader) and is_ready_made(dataset)):
        raise ValueError(
            "batch_dims is for batches that are ready made (a DataLoader with batch_size=None, "
            "distribute_datasets_from_function); with a collate_fn, each tower collates its own examples"
        )
    if isinstance(dataset, DataLoader):
        if shuffle or drop_last or collate_fn is not None or num_workers:
            raise ValueError(
                "shuffle, drop_last, collate_fn and num_workers belong to the DataLoader that was given; set them there"
            )
        seed = _seed_of(dataset, default_seed) if seed is None else seed
        return _from_loader(distribution, dataset, global_batch_size, seed, batch_dims)
    seed = default_seed if seed is None else seed
    _check_batch_size(global_batch_size)
    if isinstance(dataset, IterableDataset):
        if shuffle:
            raise ValueError("an IterableDataset defines its own order: shuffle inside it")
    else:
        if isinstance(dataset, list) and collate_fn is None and global_batch_size != 1:
            refuse_columns(dataset)
        dataset = as_slices(dataset)
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise TypeError(
                f"a {type(dataset).__name__} cannot be distributed: it has no __getitem__ and __len__, and is "
                "not an IterableDataset; for a generator use distribute_datasets_from_function"
            )
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_size=global_batch_size,
        shuffle=True if shuffle and len(dataset) else None,  # torch refuses to shuffle nothing
        drop_last=drop_last,
        collate_fn=collate_fn,
        num_workers=num_workers,
        # With workers, a thread of the loader pins batches; otherwise they are pinned when they are copied. Workers
        # return CPU tensors. A dataset in the main process may return GPU tensors, which cannot be pinned.
        pin_memory=distribution.comm.device.type != "cpu" and num_workers > 0,
    )
    return _from_loader(distribution, loader, None, seed, None)


def _from_loader(
    distribution: Distribution, loader: DataLoader[Any], global_batch_size: int | None, seed: int, dims: Dims
) -> DistributedDataset:
    size = loader.batch_size
    if global_batch_size is not None and global_batch_size != size:
        raise ValueError(
            f"global_batch_size is {global_batch_size}, but the DataLoader's batch_size, which is the global one, "
            f"is {size}; leave global_batch_size out"
        )
    if any(isinstance(s, DistributedSampler) for s in (loader.sampler, getattr(loader.batch_sampler, "sampler", None))):
        raise ValueError(
            "the DataLoader has a DistributedSampler, so its data would be split twice: give distribute_dataset "
            "a DataLoader with the global batch size and without that sampler"
        )
    if isinstance(loader.dataset, IterableDataset) or is_ready_made(loader):
        settings: dict[str, object] = {"global_batch_size": size, "drop_last": loader.drop_last}
        if isinstance(loader.dataset, IterableDataset):
            settings["num_workers"] = loader.num_workers  # determines the order of the examples
        else:
            settings["sampler"] = type(loader.sampler).__name__
            with contextlib.suppress(TypeError):  # data without a length
                settings["batches"] = len(loader.dataset)  # type: ignore[arg-type]
        from mirrored.data.streams import StreamDataset

        return StreamDataset(distribution, loader, seed, settings, dims)
    sampler = loader.sampler if size is not None else loader.batch_sampler  # the latter yields the user's own batches
    if is_plain(sampler, loader.dataset):
        sampler = None
    shuffle = isinstance(loader.sampler, RandomSampler)
    examples = len(loader.dataset)  # type: ignore[arg-type]
    order = Order(examples, size, shuffle=shuffle, drop_last=loader.drop_last, sampler=sampler)
    settings = {"examples": examples, "global_batch_size": size, "shuffle": shuffle, "drop_last": loader.drop_last}
    with contextlib.suppress(TypeError):  # a sampler without a length
        settings["steps"] = len(order)
    if sampler is not None:
        settings["sampler"] = type(sampler).__name__
    _say_if_small(distribution, settings, f"{type(loader.dataset).__name__}, {examples} examples")
    if shuffle:
        _say_if_again(distribution, loader.dataset, seed)
    return MapDataset(distribution, loader, order, seed, settings)


def _seed_of(loader: DataLoader[Any], default: int) -> int:
    """Returns the seed of the generator of a loader or its sampler, or the default."""
    inner = getattr(loader.batch_sampler, "sampler", None)
    for owner in (loader, loader.sampler, loader.batch_sampler, inner):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator):
            return generator.initial_seed()
    return default


def _check_batch_size(size: object) -> None:
    if size is None:
        raise ValueError("global_batch_size is missing: how many examples all towers together take in a step")
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"global_batch_size is {size!r}, but must be a whole number from 1")


def _say_if_again(distribution: Distribution, dataset: Any, seed: int) -> None:
    """Warns that shuffled data which are distributed again, as in each epoch, repeat the order of the first epoch."""
    shuffled = distribution.known.shuffled
    owner = next(iter(dataset.leaves())) if isinstance(dataset, Slices) else dataset
    with contextlib.suppress(TypeError):  # lists do not support weak references
        seeds = shuffled.setdefault(owner, Counter())
        seeds[seed] += 1
        if seeds[seed] == 2 and distribution.comm.index == 0:
            log.warning(
                "distribute_dataset(…, shuffle=True) was called again for the same data, so the order of the "
                "first epoch repeats: for a new order in each epoch, call it once, before the loop over the "
                "epochs"
            )


def _say_if_small(distribution: Distribution, settings: dict[str, object], dataset: str) -> None:
    """Logs that towers will have no examples in some steps, which a model may not support."""
    comm, cut = distribution.comm, distribution.cut
    size, examples = settings["global_batch_size"], settings["examples"]
    if comm.index > 0 or not isinstance(size, int) or not isinstance(examples, int):
        return
    last = 0 if settings["drop_last"] else examples % size
    if idle := cut.empty_shares(size):
        batch, steps, smaller = "the global batch", "each step", size
    elif last and (idle := cut.empty_shares(last)):
        batch, steps, smaller = "the last batch of an epoch", "that step", last
    else:
        return
    tip = "" if cut.stand_in else "; a model that cannot take an empty batch needs distribute_dataset(…, stand_in=True)"
    text = (
        f"{batch} ({dataset}) has {smaller} example{'s' * (smaller > 1)} for {comm.size} towers, which leaves "
        f"{idle} tower{'s' * (idle > 1)} without examples in {steps}{tip}"
    )
    if text not in distribution.known.hints:  # a script may distribute the same data in each epoch
        distribution.known.hints.add(text)
        log.info("%s", text)
