"""Examples whose random augmentation depends on nothing but (seed, epoch, index)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import TensorDataset, default_collate, get_worker_info

from mirrored import seeds
from mirrored.shares import Batch, Cut, Pieces, Share, is_array
from towers.system import tree as trees


class Slices:
    """The examples of arrays that have one of each in their first dimension, as ``tf.data`` slices them.

    Args:
        arrays: tensors and arrays in tuples, named tuples and dicts; examples have this structure, too.

    Raises:
        TypeError: there is something else in it, or a single number.
        ValueError: not all have one length.
    """

    def __init__(self, arrays: Any) -> None:
        lengths: dict[str, int] = {}
        for path, leaf in _leaves(arrays, "dataset"):
            if not isinstance(leaf, (torch.Tensor, np.ndarray)) or leaf.ndim == 0:
                kind = "a single number" if isinstance(leaf, (torch.Tensor, np.ndarray)) else f"a {type(leaf).__name__}"
                raise TypeError(
                    f"a {type(arrays).__name__} with tensors in it stands for their slices, but {path} is {kind}: give "
                    "tensors or arrays with the examples as their first dimension, or a list of examples"
                )
            lengths[path] = len(leaf)
        if len(set(lengths.values())) > 1:
            sizes = ", ".join(f"{path} has {length}" for path, length in lengths.items())
            raise ValueError(f"tensors that are to be sliced need one length, but {sizes} entries")
        self._arrays = arrays
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._length

    def leaves(self) -> Iterator[Any]:
        """The arrays."""
        return trees.leaves(self._arrays)

    def __getitem__(self, index: int) -> Any:
        return trees.map_leaves(lambda array: array[index], self._arrays)


def as_slices(dataset: Any) -> Any:
    """A tuple or dict with tensors in it as :class:`Slices`; anything else as it is."""
    if not isinstance(dataset, (tuple, Mapping)):
        return dataset
    has_arrays = any(isinstance(leaf, (torch.Tensor, np.ndarray)) for leaf in trees.leaves(dataset))
    return Slices(dataset) if has_arrays else dataset


def refuse_columns(dataset: list[Any]) -> None:
    """Refuse a list of whole arrays (inputs, labels) that are to be collated, as if each were an example.

    Raises:
        ValueError: the first two are arrays of one length and of different shapes.
    """
    first = [tuple(entry.shape) for entry in dataset[:2] if is_array(entry) and entry.ndim]
    if len(first) == 2 and first[0][0] == first[1][0] and first[0] != first[1]:
        raise ValueError(
            f"a list holds one example in each entry, but these have the shapes {first[0]} and {first[1]}: where they "
            "have the examples as their first dimension, give a tuple of them"
        )


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """The leaves of tuples and dicts with their paths; a list is a leaf."""
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _leaves(entry, f"{path}[{key!r}]")
    elif isinstance(value, tuple):
        for i, entry in enumerate(value):
            yield from _leaves(entry, f"{path}[{i}]")
    else:
        yield path, value


_WITHOUT_RANDOMNESS = (TensorDataset, Slices, list, tuple, range)


class Request(NamedTuple):
    """The sampler's request for a tower's share of a global batch, in an epoch of a run.

    Attributes:
        indices: those of the share's examples; where it has none, the batch's first example's, from which an empty
            batch or a stand-in is made.
        total: examples of all towers together.
    """

    seed: int
    epoch: int
    indices: list[Any]
    total: int


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

    def __getitems__(self, request: Request) -> tuple[Request, list[Any]]:
        """The request, and its examples."""
        if self._plain:
            return request, [self.dataset[index] for index in request.indices]
        with _own_randomness():
            return request, [self._load(request, index) for index in request.indices]

    def _load(self, request: Request, index: Any) -> Any:
        seeds.seed_cpu(seeds.mix(request.seed, "example", request.epoch, index))
        return self.dataset[index]


def _own_randomness() -> contextlib.AbstractContextManager[None]:
    """A context in which generators may be seeded: outside of loader workers their states are restored after it."""
    return contextlib.nullcontext() if get_worker_info() is not None else seeds.undisturbed()


class CollatedParts(NamedTuple):
    """A share whose virtual towers' parts were collated one by one, since they may be padded differently, say.

    Attributes:
        collated: all examples of the share, collated once more.
        parts: the batches of the virtual towers that have examples.
    """

    collated: Any
    parts: tuple[Any, ...]

    def pieces(self) -> Pieces:
        """What stands in each part for the arrays and structures of the share."""
        pieces: Pieces = {}
        _pair(self.collated, self.parts, pieces)
        return pieces


def _pair(value: Any, parts: Sequence[Any], pieces: Pieces) -> None:
    """Add the pieces of a value, and of the values in it."""
    if not is_array(value) and (not isinstance(value, (Mapping, list, tuple)) or not value):
        return
    pieces[id(value)] = value, parts  # with it, so that nothing else gets its id
    if isinstance(value, Mapping):
        for key in value:
            _pair(value[key], [part[key] for part in parts], pieces)
    elif isinstance(value, (list, tuple)) and all(len(part) == len(value) for part in parts):
        for entry, *others in zip(value, *parts, strict=True):
            _pair(entry, others, pieces)


class PartCollate:
    """A collate function with a random stream of its own for every part of a batch (masking, mixing of examples).

    Parts are the towers' shares, or the virtual towers' parts of them: what is drawn, and how far a part is padded,
    must not depend on how many towers there are. Neither the model's random streams nor the data's are touched.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any], cut: Cut) -> None:
        self._collate_fn = collate_fn
        self._cut = cut
        self._is_custom = collate_fn is not default_collate  # whose parts can be cut out of the share's batch, too

    def collate(self, examples: list[Any], total: int, seeds_of: Callable[[int], int]) -> Batch:
        """One batch, or a :class:`CollatedParts`, and the share that it is.

        Args:
            examples: the share's examples; where it has none, the batch's first.
            total: how many examples the global batch has.
            seeds_of: a seed for the part that begins with a certain one of the examples.

        Raises:
            TypeError: an empty batch cannot be made.
        """
        share = self._cut.share(total)
        return self._collated(examples, share, seeds_of), share

    def _collated(self, examples: list[Any], share: Share, seeds_of: Callable[[int], int]) -> Any:
        if examples and not share.entries:
            from mirrored.empty_shares.empty_batch import empty_batch

            with _own_randomness():
                return empty_batch(lambda some: self._seeded(some, seeds_of(0)), examples[0], self._cut.tower)
        if not self._is_custom or not examples:
            return self._collate_fn(examples)
        cuts = [(start, end) for start, end in self._cut.parts_of(len(examples)) if start < end]
        with _own_randomness():
            parts = [self._seeded(examples[start:end], seeds_of(start)) for start, end in cuts]
            if share.stand_in or not self._cut.virtual:
                return parts[0]
            batch = self._seeded(examples, seeds_of(0)) if len(parts) > 1 else parts[0]
            return CollatedParts(batch, tuple(parts))

    def _seeded(self, examples: list[Any], seed: int) -> Any:
        seeds.seed_cpu(seed)
        return self._collate_fn(examples)


class MapCollate(PartCollate):
    """Collates a share of what :class:`SeededExamples` gives (for map-style datasets)."""

    def __call__(self, loaded: tuple[Request, list[Any]]) -> Batch:
        request, examples = loaded

        def seed_of(start: int) -> int:
            return seeds.mix(request.seed, "collate", request.epoch, request.indices[start])

        return self.collate(examples, request.total, seed_of)


class StreamCollate(PartCollate):
    """Collates this tower's share out of the list of a global batch's examples (for iterable datasets).

    What collating draws depends on the share, so it is kept off the stream that the examples are drawn from,
    which must stay the same on all towers.
    """

    def __call__(self, examples: list[Any]) -> Batch:
        start, end = self._cut.bounds(len(examples))
        seed = int(torch.randint(2**62, (), device="cpu"))  # the same on all towers
        with seeds.undisturbed():
            own = examples[start:end] or examples[:1]
            return self.collate(own, len(examples), lambda first: seeds.mix(seed, start + first))
