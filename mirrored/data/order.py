"""The one global order of examples, and its cut into global batches, that all towers share.

[Note: orders are compared] Towers that draw different orders would train on some examples twice. An order from (seed,
epoch) needs no comparison; of all others a digest is in the announcement that begins an epoch. The same digest is in
the state of a dataset in mid-epoch, so a resumed run finds out that a sampler or a split is another one. The contents
of streams are not compared, only how many examples each batch has: augmented floating-point numbers may differ in a
last bit between processors.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader, RandomSampler, SequentialSampler, Subset

from mirrored import seeds


class Epoch:
    """One epoch of a distributed dataset: what its order of examples and its random numbers follow from.

    Args:
        sampler: a source of indices, or of batches of them; None for an order from (seed, number).
        dataset: the indices of a ``Subset`` (in a ``Subset`` …) say which examples it has.

    Attributes:
        seed: the seed of the data.
        number: how many epochs were before.
        sampled: all that the sampler gives in this epoch, the same on every tower; None without a sampler.
    """

    def __init__(self, seed: int, number: int, sampler: Iterable[Any] | None = None, dataset: object = None) -> None:
        self.seed = seed
        self.number = number
        self.sampled = self._sample(sampler) if sampler is not None else None
        self._subsets = list(_subsets(dataset))

    def seed_of(self, purpose: str) -> int:
        """The seed of this epoch's random numbers for one purpose."""
        return seeds.mix(self.seed, purpose, self.number)

    def _sample(self, sampler: Iterable[Any]) -> list[Any]:
        """A sampler's own generator keeps its seed and its place."""
        tell_epoch(sampler, self.number)
        owners = (sampler, getattr(sampler, "sampler", None))
        generators = [g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)]
        states = [generator.get_state() for generator in generators]
        seed = self.seed_of("sampler")
        try:
            for generator in generators:
                generator.manual_seed(seed)
            with seeds.undisturbed():
                seeds.seed_cpu(seed)
                return list(sampler)
        finally:
            for generator, state in zip(generators, states, strict=True):
                generator.set_state(state)

    @functools.cached_property
    def digest(self) -> str | None:
        """A digest of the order; None where settings say all. See [Note: orders are compared]."""
        if self.sampled is None and not self._subsets:
            return None
        digest = hashlib.blake2b(digest_size=16)
        for indices in (self.sampled, *self._subsets):
            digest.update(_bytes_of(indices))
        return digest.hexdigest()


def _subsets(dataset: object) -> Iterator[Sequence[Any]]:
    """The indices of all subsets that a dataset is made of."""
    if isinstance(dataset, Subset):
        yield dataset.indices
        yield from _subsets(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for member in dataset.datasets:
            yield from _subsets(member)


def _bytes_of(indices: Sequence[Any] | None) -> bytes:
    """Bytes that differ between different orders; indices are mostly whole numbers, of which there may be millions."""
    try:
        numbers = np.asarray(indices)
    except ValueError:  # batches of different sizes
        numbers = np.empty(0, dtype=object)
    if numbers.dtype.kind not in "iu":
        return json.dumps(indices, default=_plain).encode()
    return repr(numbers.shape).encode() + numbers.astype(np.int64).tobytes()


def _plain(index: Any) -> Any:
    return index.tolist() if hasattr(index, "tolist") else type(index).__name__


@dataclass(frozen=True)
class Order:
    """The global batches of example indices of every epoch.

    Attributes:
        length: number of examples.
        batch_size: examples per global batch; None where ``sampler`` yields batches.
        shuffle: a new permutation every epoch.
        drop_last: leave out an incomplete last batch.
        sampler: another source of indices than 0 … length - 1, or their permutation.
    """

    length: int
    batch_size: int | None
    shuffle: bool
    drop_last: bool
    sampler: Any = None

    def __len__(self) -> int:
        entries = self.length if self.sampler is None else len(self.sampler)
        if self.batch_size is None:
            return entries
        return entries // self.batch_size if self.drop_last else -(-entries // self.batch_size)

    def epoch(self, seed: int, number: int, dataset: object) -> Epoch:
        """An epoch of the dataset, for which the sampler is asked once."""
        epoch = Epoch(seed, number, self.sampler, dataset)
        if self.batch_size is None:
            epoch.sampled = [list(batch) for batch in epoch.sampled or []]
        return epoch

    def batches(self, epoch: Epoch, first: int) -> Iterator[list[Any]]:
        """An epoch's global batches from number ``first`` on. Skipping loads nothing."""
        if self.batch_size is None:
            yield from (epoch.sampled or [])[first:]
            return
        order: Any = range(self.length) if epoch.sampled is None else epoch.sampled
        if epoch.sampled is None and self.shuffle:
            generator = torch.Generator().manual_seed(epoch.seed_of("order"))
            order = torch.randperm(self.length, generator=generator, device="cpu")
        for start in range(first * self.batch_size, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch.tolist() if isinstance(batch, torch.Tensor) else list(batch)


def tell_epoch(source: object, epoch: int) -> None:
    """Call ``set_epoch`` where a source of data, or its sampler, has it."""
    for owner in (source, getattr(source, "sampler", None)):
        if (set_epoch := getattr(owner, "set_epoch", None)) is not None:
            set_epoch(epoch)


def is_ready_made(loader: DataLoader[Any]) -> bool:
    """Whether a loader's batches are made by its dataset."""
    return loader.batch_size is None and loader.batch_sampler is None


def is_plain(sampler: Any, dataset: Any) -> bool:
    """Whether a loader's sampler does what one of the two does that DataLoader makes itself for ``shuffle``."""
    own = type(sampler) in (RandomSampler, SequentialSampler) and not getattr(sampler, "replacement", False)
    return own and len(sampler) == len(sampler.data_source) == len(dataset)
