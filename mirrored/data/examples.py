"""Examples whose random augmentation depends on nothing but (seed, epoch, index)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

from torch.utils.data import TensorDataset, get_worker_info

from mirrored import seeds
from mirrored.data.shares import cut

_WITHOUT_RANDOMNESS = (TensorDataset, list, tuple, range)


class Key(NamedTuple):
    """What the sampler asks for: an example, in an epoch of a run."""

    seed: int
    epoch: int
    index: Any


class SeededExamples:
    """A map-style dataset that seeds the random generators before every example.

    So an example is augmented alike whichever tower loads it, in whichever loader worker, beside whichever
    others; and loading in the main process leaves the model's random streams alone.

    Args:
        dataset: has ``__getitem__``; ``__getitems__`` is not used, since its examples would share a stream.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._plain = type(dataset) in _WITHOUT_RANDOMNESS

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, keys: list[Key]) -> list[Any]:
        if self._plain:
            return [self.dataset[key.index] for key in keys]
        in_loader_worker = get_worker_info() is not None
        with contextlib.nullcontext() if in_loader_worker else seeds.undisturbed():
            return [self._load(key) for key in keys]

    def __getitem__(self, key: Key) -> Any:
        return self.__getitems__([key])[0]

    def _load(self, key: Key) -> Any:
        seeds.seed_cpu(seeds.mix(key.seed, "example", key.epoch, key.index))
        return self.dataset[key.index]


class CollateShare:
    """Collates this tower's share out of the list of a global batch's examples (for iterable datasets)."""

    def __init__(self, collate: Callable[[list[Any]], Any], bounds_of: Callable[[int], tuple[int, int]]) -> None:
        self._collate = collate
        self._bounds_of = bounds_of

    def __call__(self, examples: list[Any]) -> tuple[Any, int, int]:
        """(the collated share, its size, the global batch's size)."""
        start, end = self._bounds_of(len(examples))
        if start < end:
            return self._collate(examples[start:end]), end - start, len(examples)
        # An empty share has the shapes and dtypes of a real one.
        return cut(self._collate(examples[:1]), 0, 0), 0, len(examples)
