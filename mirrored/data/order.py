"""The global order of examples and its split into global batches, which are the same on all towers.

[Note: orders are compared] Towers that draw different orders would train on some examples twice. An order from (seed,
epoch) needs no comparison. For every other order, the announcement at the start of an epoch contains a digest. Within
an epoch, the state of a dataset contains the same digest, so a resumed run detects that a sampler or a split has
changed. The examples themselves are compared, too: [Note: contents are compared] in :mod:`mirrored.data.contents`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, DataLoader, RandomSampler, SequentialSampler, Subset

from mirrored import seeds


class Epoch:
    """One epoch of a distributed dataset, which determines its order of examples and its random numbers.

    Args:
        sampler: a source of indices, or of batches of them; None for an order from (seed, number).
        dataset: the data; the digest includes the indices of its ``Subset``, even if they are nested.

    Attributes:
        seed: the seed of the data.
        number: the number of earlier epochs.
        sampled: what the sampler yields in this epoch, the same on every tower and in every iteration; None without a
            sampler.
    """

    def __init__(self, seed: int, number: int, sampler: Iterable[Any] | None = None, dataset: object = None) -> None:
        self.seed = seed
        self.number = number
        self.sampled = self._sample(sampler) if sampler is not None else None
        self._subsets = list(_subsets(dataset))

    def seed_of(self, purpose: str) -> int:
        """Returns the seed of this epoch's random numbers for one purpose."""
        return seeds.mix(self.seed, purpose, self.number)

    def _sample(self, sampler: Iterable[Any]) -> Iterable[Any]:
        tell_epoch(sampler, self.number)
        drawn = _Drawn(sampler, self.seed_of("sampler"))
        return list(drawn) if _length_of(sampler) <= _KEPT else drawn

    @functools.cached_property
    def digest(self) -> str | None:
        """A digest of the order, or None if the settings determine it. See [Note: orders are compared]."""
        if self.sampled is None and not self._subsets:
            return None
        digest = hashlib.blake2b(digest_size=16)
        sampled: Any = self.sampled
        if isinstance(sampled, _Drawn):
            sampled = list(itertools.islice(sampled, _COMPARED))
        for indices in (sampled, *self._subsets):
            digest.update(_bytes_of(indices))
        return digest.hexdigest()


_KEPT = 1_000_000
"""Indices of an epoch that are drawn at its start. Those of a longer sampler, or of an endless one, are drawn later."""

_DRAWN = 1024
"""Indices that are drawn at once."""

_COMPARED = 65_536
"""Indices of a longer sampler that towers compare."""


def _length_of(sampler: Iterable[Any]) -> float:
    """Returns the number of a sampler's entries; infinity if it does not have one."""
    try:
        return len(sampler) if isinstance(sampler, Sized) else math.inf
    except (TypeError, NotImplementedError):
        return math.inf


class _Drawn:
    """The indices of a sampler, which are drawn while they are iterated. Every iteration draws the same.

    The global generators are not affected, and a sampler's own generator keeps its seed and its position.
    """

    def __init__(self, sampler: Iterable[Any], seed: int) -> None:
        self._sampler = sampler
        self._seed = seed

    def __iter__(self) -> Iterator[Any]:
        owners = (self._sampler, getattr(self._sampler, "sampler", None))
        generators = [g for owner in owners if isinstance(g := getattr(owner, "generator", None), torch.Generator)]
        states = [torch.Generator().manual_seed(self._seed).get_state() for _ in generators]
        stream = seeds.Stream(self._seed)
        indices: Iterator[Any] | None = None
        while True:
            with stream, _in_turn(generators, states):
                indices = iter(self._sampler) if indices is None else indices
                some = list(itertools.islice(indices, _DRAWN))
            yield from some
            if len(some) < _DRAWN:  # another call of next would start some wrappers of samplers again
                return


@contextlib.contextmanager
def _in_turn(generators: Sequence[torch.Generator], states: list[torch.Tensor]) -> Iterator[None]:
    """Lets generators continue from ``states``, which then have their new positions. Afterwards, they are as before."""
    before = [generator.get_state() for generator in generators]
    try:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        yield
        states[:] = [generator.get_state() for generator in generators]
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


def _subsets(dataset: object) -> Iterator[Sequence[Any]]:
    """Yields the indices of all subsets in a dataset."""
    if isinstance(dataset, Subset):
        yield dataset.indices
        yield from _subsets(dataset.dataset)
    elif isinstance(dataset, ConcatDataset):
        for member in dataset.datasets:
            yield from _subsets(member)


def _bytes_of(indices: Sequence[Any] | None) -> bytes:
    """Returns bytes that differ between different orders. Most indices are whole numbers, possibly millions of them."""
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
        length: the number of examples.
        batch_size: the number of examples per global batch; None if ``sampler`` yields batches.
        shuffle: whether every epoch has a new permutation.
        drop_last: whether an incomplete last batch is dropped.
        sampler: a source of indices that replaces 0 … length - 1 or their permutation.
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
        """Returns an epoch of the dataset, with the indices of one iteration over the sampler."""
        return Epoch(seed, number, self.sampler, dataset)

    def batches(self, epoch: Epoch, first: int) -> Iterator[list[Any]]:
        """Yields an epoch's global batches from number ``first`` on. Skipped batches are not loaded."""
        if self.batch_size is None:
            yield from map(list, itertools.islice(epoch.sampled or [], first, None))
            return
        if epoch.sampled is not None:
            entries = itertools.islice(epoch.sampled, first * self.batch_size, None)
            while batch := list(itertools.islice(entries, self.batch_size)):
                if len(batch) == self.batch_size or not self.drop_last:
                    yield batch
            return
        order: Any = range(self.length)
        if self.shuffle:
            generator = torch.Generator().manual_seed(epoch.seed_of("order"))
            order = torch.randperm(self.length, generator=generator, device="cpu")
        for start in range(first * self.batch_size, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            if len(batch) == self.batch_size or not self.drop_last:
                yield batch.tolist() if isinstance(batch, torch.Tensor) else list(batch)


def tell_epoch(source: object, epoch: int) -> None:
    """Calls ``set_epoch`` of a source of data and of its sampler, if they have it."""
    for owner in (source, getattr(source, "sampler", None)):
        if (set_epoch := getattr(owner, "set_epoch", None)) is not None:
            set_epoch(epoch)


def is_ready_made(loader: DataLoader[Any]) -> bool:
    """Returns whether a loader's dataset yields batches."""
    return loader.batch_size is None and loader.batch_sampler is None


def is_plain(sampler: Any, dataset: Any) -> bool:
    """Returns whether a loader's sampler is equivalent to a sampler that DataLoader itself creates for ``shuffle``."""
    own = type(sampler) in (RandomSampler, SequentialSampler) and not getattr(sampler, "replacement", False)
    return own and len(sampler) == len(sampler.data_source) == len(dataset)
