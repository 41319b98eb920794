"""Examples whose random augmentation depends on nothing but (seed, epoch, index)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.data import TensorDataset, get_worker_info

from mirrored import seeds
from mirrored.data.shares import Cut, cut

_WITHOUT_RANDOMNESS = (TensorDataset, list, tuple, range)


class Key(NamedTuple):
    """What the sampler asks for: an example, in an epoch of a run."""

    seed: int
    epoch: int
    index: Any


class Examples(list[Any]):
    """The examples of one share, with what the sampler asked for."""

    keys: list[Key]


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
        examples.keys = keys
        return examples

    def __getitem__(self, key: Key) -> Any:
        return self.__getitems__([key])[0]

    def _load(self, key: Key) -> Any:
        seeds.seed_cpu(seeds.mix(key.seed, "example", key.epoch, key.index))
        return self.dataset[key.index]


def _own_randomness() -> contextlib.AbstractContextManager[None]:
    """Lets generators be seeded: in a loader worker they are nobody else's, elsewhere they are put back."""
    return contextlib.nullcontext() if get_worker_info() is not None else seeds.undisturbed()


class Joined(NamedTuple):
    """A share whose virtual towers' parts were collated one by one, since they may be padded differently, say.

    Attributes:
        whole: all of it, collated once more.
        parts: of the virtual towers that have examples.
    """

    whole: Any
    parts: tuple[Any, ...]


class ShareCollate:
    """A collate function with a random stream of its own for every part of a batch (masking, mixing of examples).

    Parts are the towers' shares, or the virtual towers' parts of them: what is drawn, and how far a part is padded,
    must not depend on how many towers there are. Neither the model's random streams nor the data's are touched.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], cut: Cut) -> None:
        self._collate = collate
        self._cut = cut

    def __call__(self, examples: list[Any], seeds_of: Callable[[int], int]) -> Any:
        """One batch, or a :class:`Joined`.

        Args:
            seeds_of: a seed for the part that begins with a certain one of the examples.
        """
        cuts = [(start, end) for start, end in self._cut.parts_of(len(examples)) if start < end]
        with _own_randomness():
            parts = []
            for start, end in cuts:
                seeds.seed_cpu(seeds_of(start))
                parts.append(self._collate(examples[start:end]))
            if len(parts) == 1:
                return parts[0]
            seeds.seed_cpu(seeds_of(0))
            return Joined(self._collate(examples), tuple(parts))


class SeededCollate:
    """A :class:`ShareCollate` for a map-style dataset's examples."""

    def __init__(self, collate: Callable[[list[Any]], Any], cut: Cut) -> None:
        self._collate = ShareCollate(collate, cut)

    def __call__(self, examples: Examples) -> Any:
        return self._collate(list(examples), lambda start: _collate_seed(examples.keys[start]))


def _collate_seed(key: Key) -> int:
    return seeds.mix(key.seed, "collate", key.epoch, key.index)


class CollateShare:
    """Collates this tower's share out of the list of a global batch's examples (for iterable datasets).

    What collating draws depends on the share, so it is kept off the stream that the examples are drawn from,
    which must stay the same on all towers.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], cut: Cut) -> None:
        self._collate = ShareCollate(collate, cut)
        self._cut = cut

    def __call__(self, examples: list[Any]) -> tuple[Any, int, int]:
        """(the collated share, its size, the global batch's size)."""
        start, end = self._cut.bounds(len(examples))
        seed = int(torch.randint(2**62, (), device="cpu"))  # the same on all towers
        with seeds.undisturbed():
            # An empty share has the shapes and dtypes of a real one.
            batch = self._collate(examples[start:end] or examples[:1], lambda first: seeds.mix(seed, start + first))
            return (batch if start < end else cut(batch, 0, 0)), end - start, len(examples)
