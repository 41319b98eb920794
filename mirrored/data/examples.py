"""Examples whose random augmentation depends only on (seed, epoch, index)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import TensorDataset, default_collate, get_worker_info

from mirrored import seeds
from mirrored.data import contents
from mirrored.shares import Batch, Cut, Pieces, Share, is_array
from towers.system import tree as trees


class Slices:
    """The examples along the first dimension of arrays, as ``tf.data`` slices them.

    Args:
        arrays: tensors and arrays in tuples, named tuples and dicts. Examples have this structure, too.

    Raises:
        TypeError: ``arrays`` contains another object, or a single number.
        ValueError: the lengths differ.
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
        """Yields the arrays."""
        return trees.leaves(self._arrays)

    def __getitem__(self, index: int) -> Any:
        return trees.map_leaves(lambda array: array[index], self._arrays)


def as_slices(dataset: Any) -> Any:
    """Returns a tuple or dict that contains tensors as :class:`Slices`, and any other object unchanged."""
    if not isinstance(dataset, (tuple, Mapping)):
        return dataset
    has_arrays = any(isinstance(leaf, (torch.Tensor, np.ndarray)) for leaf in trees.leaves(dataset))
    return Slices(dataset) if has_arrays else dataset


def refuse_columns(dataset: list[Any]) -> None:
    """Refuses a list of whole arrays (inputs, labels) that would be collated as if each array were an example.

    Raises:
        ValueError: the first two entries are arrays of equal length and different shapes.
    """
    first = [tuple(entry.shape) for entry in dataset[:2] if is_array(entry) and entry.ndim]
    if len(first) == 2 and first[0][0] == first[1][0] and first[0] != first[1]:
        raise ValueError(
            f"a list holds one example in each entry, but these have the shapes {first[0]} and {first[1]}: where they "
            "have the examples as their first dimension, give a tuple of them"
        )


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yields the leaves of tuples and dicts with their paths. A list is a leaf."""
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
        indices: the indices of the share's examples. For an empty share: the index of the batch's first example, from
            which an empty batch or a stand-in is made.
        total: the number of examples of all towers together.
        loads: the number of times that each example is loaded to describe it (:mod:`.contents`). 0: the request is
            for a batch.
    """

    seed: int
    epoch: int
    indices: list[Any]
    total: int
    loads: int = 0


class SeededExamples:
    """A map-style dataset that seeds the random generators before every example.

    An example is therefore augmented identically, whichever tower or loader worker loads it, and whichever examples are
    loaded with it. Loading in the main process does not change the model's random streams.

    Args:
        dataset: has ``__getitem__``. ``__getitems__`` is not used, since its examples would share a stream.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._plain = type(dataset) in _WITHOUT_RANDOMNESS

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, request: Request) -> tuple[Request, list[Any]]:
        """Returns the request and its examples, or their descriptions."""
        if request.loads:
            return request, self._described(request)
        if self._plain:
            return request, [self.dataset[index] for index in request.indices]
        with _own_randomness():
            return request, [self._load(request, index) for index in request.indices]

    def _described(self, request: Request) -> list[Any]:
        if self._plain:
            arrays = getattr(self.dataset, "tensors", ()) or [*getattr(self.dataset, "leaves", tuple)()]
            return [contents.describe(arrays), *(contents.describe(self.dataset[index]) for index in request.indices)]
        with _own_randomness():
            return [
                contents.stable([contents.describe(self._load(request, index)) for _ in range(request.loads)])
                for index in request.indices
            ]

    def _load(self, request: Request, index: Any) -> Any:
        seeds.seed_cpu(seeds.mix(request.seed, "example", request.epoch, index))
        try:
            return self.dataset[index]
        except StopIteration as error:  # it would end the loop over the batches
            raise RuntimeError(f"the dataset raised StopIteration for example {index}") from error


def _own_randomness() -> contextlib.AbstractContextManager[None]:
    """Returns a context for seeding generators. Outside loader workers, their states are restored after it."""
    return contextlib.nullcontext() if get_worker_info() is not None else seeds.undisturbed()


class CollatedParts(NamedTuple):
    """A share whose virtual towers' parts were collated separately, for example because they are padded differently.

    Attributes:
        collated: all examples of the share, collated together.
        parts: the batches of the virtual towers that have examples.
    """

    collated: Any
    parts: tuple[Any, ...]

    def pieces(self) -> Pieces:
        """Returns the values of each part that correspond to the arrays and structures of the share."""
        pieces: Pieces = {}
        _pair(self.collated, self.parts, pieces)
        return pieces


def _pair(value: Any, parts: Sequence[Any], pieces: Pieces) -> None:
    """Adds the pieces of a value, and of the values in it."""
    if not is_array(value) and (not isinstance(value, (Mapping, list, tuple)) or not value):
        return
    pieces[id(value)] = value, parts  # keeps the value alive, so that no other object gets its id
    if isinstance(value, Mapping):
        for key in value:
            _pair(value[key], [part[key] for part in parts], pieces)
    elif isinstance(value, (list, tuple)) and all(len(part) == len(value) for part in parts):
        for entry, *others in zip(value, *parts, strict=True):
            _pair(entry, others, pieces)


class PartCollate:
    """A collate function with a separate random stream for every part of a batch (masking, mixing of examples).

    Parts are the towers' shares, or the virtual towers' parts of the shares. The random draws and the padding of a part
    must not depend on the number of towers. The random streams of the model and of the data do not change.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any], cut: Cut) -> None:
        self._collate_fn = collate_fn
        self._cut = cut
        self._is_custom = collate_fn is not default_collate  # parts of its batches can be sliced

    def collate(self, examples: list[Any], total: int, seeds_of: Callable[[int], int]) -> Batch:
        """Returns a batch or a :class:`CollatedParts`, and its share.

        Args:
            examples: the share's examples; for an empty share, the batch's first example.
            total: the number of examples of the global batch.
            seeds_of: returns the seed of the part that starts at an index of ``examples``.

        Raises:
            TypeError: an empty batch cannot be made.
        """
        share = self._cut.share(total)
        return self._collated(examples, share, seeds_of), share

    def _collated(self, examples: list[Any], share: Share, seeds_of: Callable[[int], int]) -> Any:
        if examples and not share.entries:
            from mirrored.empty_shares import empty_batch

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
        try:
            return self._collate_fn(examples)
        except StopIteration as error:  # it would end the loop over the batches
            raise RuntimeError("collate_fn raised StopIteration") from error


class MapCollate(PartCollate):
    """Collates a share that :class:`SeededExamples` returns (for map-style datasets)."""

    def __call__(self, loaded: tuple[Request, list[Any]]) -> Batch:
        request, examples = loaded
        if request.loads:
            return examples, Share(0, 0)

        def seed_of(start: int) -> int:
            return seeds.mix(request.seed, "collate", request.epoch, request.indices[start])

        return self.collate(examples, request.total, seed_of)


class StreamBatch(NamedTuple):
    """A share of a stream's batch, and the description of some of all its examples."""

    batch: Batch
    described: list[Any]


class StreamCollate(PartCollate):
    """Collates this tower's share from the list of a global batch's examples (for iterable datasets).

    Random draws during collation depend on the share. They therefore do not use the stream from which examples are
    drawn, which must stay the same on all towers.
    """

    def __call__(self, examples: list[Any]) -> StreamBatch:
        start, end = self._cut.bounds(len(examples))
        seed = int(torch.randint(2**62, (), device="cpu"))  # the same on all towers
        described = [contents.describe(example) for example in some_of(examples)]
        with seeds.undisturbed():
            own = examples[start:end] or examples[:1]
            batch = self.collate(own, len(examples), lambda first: seeds.mix(seed, start + first))
        return StreamBatch(batch, described)


def some_of(examples: Sequence[Any]) -> list[Any]:
    """Returns the examples of a batch that are described: the first, the last and one between them."""
    return [examples[i] for i in sorted({0, len(examples) // 2, len(examples) - 1})] if len(examples) else []
