"""Batches of ``fit``, ``evaluate`` and ``predict``, split among the towers.

``batch_size`` is the global batch size. Keras' data adapters create the global batches, in the same order on all
towers, because towers draw the same random numbers outside of steps. Each tower keeps its share. From arrays, it loads
only its share. A ``DataLoader`` becomes a distributed dataset, whose towers load their shares. A result of
``strategy.distribute_dataset`` is used unchanged. No example is padded or dropped. A tower with an empty share receives
an example that does not count.

[Note: a batch's shape may depend on all of its examples] A ``collate_fn`` may pad to the longest example of a batch. If
each tower padded its own share, a metric that counts entries would differ from one device's, without an error (an
accuracy of 0.68 instead of 0.27). So towers load the whole batches of a ``DataLoader`` that has a ``collate_fn``.
"""

from __future__ import annotations

import functools
import types
import weakref
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, default_collate, default_convert

from mirrored.data.dataset import DistributedDataset
from mirrored.data.distribute import InputContext
from mirrored.interceptor import interceptor
from mirrored.keras.keras_private import ArrayDataAdapter, DataAdapter, TorchEpochIterator, around, data_adapters
from mirrored.shares import Share, cut_for
from mirrored.strategy.base import Strategy
from towers.collectives.agreement import announce
from towers.collectives.communicator import Communicator
from towers.errors import DisagreementError


@dataclass
class Loop:
    """A call of ``fit``, ``evaluate`` or ``predict``, or of their methods for one batch.

    Attributes:
        strategy: the model's strategy.
        reads_every: the number of batches between reads of the logs; 0 for reads at the end of the epoch only.
        steps: the number of batches so far.
        logs: the logs of all towers at the last read.
        skip: the number of next batches to skip, because they were used before, and a function to call after that.
        builds: whether a batch is read to build the model.
        make_data: creates the data of a worker of parameter servers.
    """

    strategy: Strategy
    reads_every: int = 0
    steps: int = 0
    logs: dict[str, Any] = field(default_factory=dict)
    skip: tuple[int, Callable[[], None]] | None = None
    builds: bool = False
    make_data: Callable[[InputContext], Iterable[Any]] | None = None


running: Loop | None = None
"""The innermost loop, which may run in another loop's callbacks. Keras' adapters and iterators have no reference to a
model.
"""

_distributed: weakref.WeakKeyDictionary[Any, tuple[Strategy, DistributedDataset]] = weakref.WeakKeyDictionary()
"""The strategy and distributed dataset of each ``DataLoader``."""


def share_of(strategy: Strategy, batch: Any) -> tuple[Any, Share]:
    """Returns this tower's share of a batch: the known share, or a slice of a global batch.

    Raises:
        ValueError: the arrays of the batch have different lengths.
    """
    known = strategy.known_shares.of(batch)
    if known:
        share = max(known, key=lambda each: each.total)
        if share.local or share.stand_in:
            return batch, share
        return _note(strategy, _map(_zeros, batch), Share(0, share.total, True, True))
    sizes = {len(leaf) for leaf in keras.tree.flatten(batch) if _is_array(leaf)}
    if len(sizes) != 1:
        raise ValueError(f"the arrays of a batch have different numbers of examples: {sorted(sizes)}")
    rows, share = _cut(strategy, sizes.pop())
    return _note(strategy, _map(lambda leaf: leaf[rows], batch), share)


def _cut(strategy: Strategy, total: int) -> tuple[slice, Share]:
    """Returns this tower's rows of a global batch (or the first row as a stand-in), and its share."""
    cut = replace(cut_for(strategy.num_replicas_in_sync, strategy.topology.index, None), stand_in=True)
    share = cut.share(total)
    return slice(*cut.bounds(total)) if share.local else slice(0, 1), share


def _note(strategy: Strategy, batch: Any, share: Share) -> tuple[Any, Share]:
    strategy.known_shares.add(batch, share)
    return batch, share


def _is_array(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and len(leaf.shape) > 0


def _map(function: Any, batch: Any) -> Any:
    return keras.tree.map_structure(lambda leaf: function(leaf) if _is_array(leaf) else leaf, batch)


def _zeros(leaf: Any) -> Tensor:
    return torch.zeros((1, *leaf.shape[1:]), dtype=torch.as_tensor(leaf).dtype, device=getattr(leaf, "device", None))


@around(data_adapters, "get_data_adapter")
def _get_data_adapter(original: Any, x: Any, y: Any = None, sample_weight: Any = None, **kwargs: Any) -> Any:
    made_by_workers = isinstance(x, (types.FunctionType, types.MethodType, functools.partial))
    if running is None or not (made_by_workers or loads_shares(x)):
        return original(x, y, sample_weight, **kwargs)
    for name, value in {"y": y, "sample_weight": sample_weight, "class_weight": kwargs.get("class_weight")}.items():
        if value is not None:
            raise ValueError(f"{name} was given together with a {type(x).__name__}, whose batches must contain it")
    if not made_by_workers:
        return _DistributedAdapter(distributed(running.strategy, x))
    if not hasattr(running.strategy, "coordinator"):
        raise TypeError(
            "the data are a function, which is possible with a ParameterServerStrategy only. With other strategies, "
            "give model.fit the result of strategy.distribute_datasets_from_function"
        )
    if kwargs.get("steps_per_epoch") is None:
        raise ValueError("the data are a function for each worker, without a known end: set steps_per_epoch")
    return _WorkersAdapter(running, x)


def loads_shares(x: Any) -> bool:
    """Returns whether towers load their shares of the data of ``fit`` with a distributed dataset.

    See [Note: a batch's shape may depend on all of its examples].
    """
    own = isinstance(x, DataLoader) and x.collate_fn in (default_collate, default_convert)
    return own or isinstance(x, DistributedDataset)


def distributed(strategy: Strategy, data: DataLoader[Any] | DistributedDataset) -> DistributedDataset:
    """Returns the distributed dataset of the data of ``fit``, and creates it if needed."""
    if isinstance(data, DistributedDataset):
        return data
    maker, dataset = _distributed.get(data, (None, None))
    if dataset is None or maker is not strategy:
        dataset = strategy.distribute_dataset(data, stand_in=True)
        _distributed[data] = strategy, dataset
    return dataset


class _DistributedAdapter(DataAdapter):  # type: ignore[misc]
    """Makes a distributed dataset available to Keras."""

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset

    def get_torch_dataloader(self) -> DistributedDataset:
        return self._dataset

    @property
    def num_batches(self) -> int | None:
        try:
            return len(self._dataset)
        except TypeError:
            return None


class OfWorker:
    """Takes the place of a batch that a worker of parameter servers reads."""


class _WorkersAdapter(DataAdapter):  # type: ignore[misc]
    """Makes data available to Keras that each worker of parameter servers creates itself."""

    num_batches = None

    def __init__(self, loop: Loop, make_data: Callable[[InputContext], Iterable[Any]]) -> None:
        self._loop = loop
        loop.make_data = make_data

    def get_torch_dataloader(self) -> Iterable[Any]:
        return self

    def __iter__(self) -> Iterator[Any]:
        if self._loop.builds and self._loop.make_data is not None:
            yield next(iter(self._loop.make_data(InputContext(1, 0, 1))))
        while True:
            yield OfWorker()


@around(TorchEpochIterator, "_get_iterator")
def _get_iterator(original: Any, iterator: Any) -> Any:
    loader = original(iterator)
    if running is None or isinstance(loader, DistributedDataset):
        return loader
    strategy = running.strategy
    if strategy.num_replicas_in_sync > 1:
        owned = _own_examples if isinstance(iterator.data_adapter, ArrayDataAdapter) else _own_rows
        loader = owned(strategy, loader)
    return interceptor().batches(iterator, lambda first: iter(loader), 0)


@around(TorchEpochIterator, "__next__")
def _next(original: Any, iterator: Any) -> Any:
    if running is not None and running.skip is not None:
        (batches, then), running.skip = running.skip, None
        for _ in range(batches):
            original(iterator)
        then()
    return original(iterator)


def _own_examples(strategy: Strategy, loader: DataLoader[Any]) -> Iterator[Any]:
    """Yields this tower's shares of batches of arrays. The tower loads only these."""
    shares: deque[Share] = deque()  # of batches whose indices were drawn and that are not loaded yet

    def own_indices() -> Iterator[list[int]]:
        for indices in loader.batch_sampler:  # type: ignore[union-attr]
            rows, share = _cut(strategy, len(indices))
            shares.append(share)
            yield indices[rows]

    own = DataLoader(loader.dataset, batch_sampler=own_indices(), collate_fn=loader.collate_fn)
    batches = iter(own)  # draws its seed now, as on one tower
    return (_note(strategy, batch, shares.popleft())[0] for batch in batches)


def _own_rows(strategy: Strategy, loader: Iterable[Any]) -> Iterator[Any]:
    """Returns this tower's shares of batches that every tower loads completely."""

    def shares(batches: Iterator[Any]) -> Iterator[Any]:
        for step, batch in enumerate(batches):
            if step == 0:
                _check_same(strategy.communicator, batch)
            yield share_of(strategy, batch)[0]

    return shares(iter(loader))  # draws its seed now, as on one tower


def _check_same(comm: Communicator, batch: Any) -> None:
    """Checks with the first batch of an epoch that all towers read the same batches.

    Raises:
        DisagreementError: on all towers: the batches differ.
    """
    arrays = [leaf for leaf in keras.tree.flatten(batch) if _is_array(leaf)]
    checksum = 0
    for array in arrays:
        checksum = zlib.crc32(np.ascontiguousarray(keras.ops.convert_to_numpy(array)).tobytes(), checksum)
    described = announce(comm, "an epoch of a Keras model", [[list(array.shape) for array in arrays], checksum])
    different = [tower for tower, other in enumerate(described) if other != described[0]]
    if different:
        raise DisagreementError(
            f"the first batch of an epoch on tower {different[0]} differs from the one on tower 0, but each "
            "tower keeps its share of the same batch: seed the data's own generators (numpy's default_rng(), "
            "tf.random), or draw from np.random, random and torch, which are equal on all towers"
        )
