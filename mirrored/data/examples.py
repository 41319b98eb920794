"""Examples whose random augmentation depends on nothing but (seed, epoch, index)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.data import TensorDataset, get_worker_info

from mirrored import seeds
from mirrored.data.shares import cut

_WITHOUT_RANDOMNESS = (TensorDataset, list, tuple, range)


class Key(NamedTuple):
    """What the sampler asks for: an example, in an epoch of a run."""

    seed: int
    epoch: int
    index: Any


class Examples(list[Any]):
    """The examples of one share, with the seed for what collating them draws."""

    seed: int = 0


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

    def __getitems__(self, keys: list[Key]) -> Examples:
        if self._plain:
            examples = Examples(self.dataset[key.index] for key in keys)
        else:
            with _own_randomness():
                examples = Examples(self._load(key) for key in keys)
        examples.seed = seeds.mix(keys[0].seed, "collate", keys[0].epoch, keys[0].index)
        return examples

    def __getitem__(self, key: Key) -> Any:
        return self.__getitems__([key])[0]

    def _load(self, key: Key) -> Any:
        seeds.seed_cpu(seeds.mix(key.seed, "example", key.epoch, key.index))
        return self.dataset[key.index]


def _own_randomness() -> contextlib.AbstractContextManager[None]:
    """Lets generators be seeded: in a loader worker they are nobody else's, elsewhere they are put back."""
    return contextlib.nullcontext() if get_worker_info() is not None else seeds.undisturbed()


class SeededCollate:
    """A collate function with a random stream of its own for every share (masking, mixing of examples).

    Towers draw different numbers, and neither the model's random streams nor the data's are touched.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, examples: Examples) -> Any:
        with _own_randomness():
            seeds.seed_cpu(examples.seed)
            return self._collate(list(examples))


class CollateShare:
    """Collates this tower's share out of the list of a global batch's examples (for iterable datasets).

    What collating draws depends on the share, so it is kept off the stream that the examples are drawn from,
    which must stay the same on all towers.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], bounds_of: Callable[[int], tuple[int, int]]) -> None:
        self._collate = collate
        self._bounds_of = bounds_of

    def __call__(self, examples: list[Any]) -> tuple[Any, int, int]:
        """(the collated share, its size, the global batch's size)."""
        start, end = self._bounds_of(len(examples))
        seed = int(torch.randint(2**62, ()))  # the same on all towers
        with seeds.undisturbed():
            seeds.seed_cpu(seeds.mix(seed, start))
            if start < end:
                return self._collate(examples[start:end]), end - start, len(examples)
            # An empty share has the shapes and dtypes of a real one.
            return cut(self._collate(examples[:1]), 0, 0), 0, len(examples)
