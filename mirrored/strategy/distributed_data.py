"""Sharing out data among the towers: the methods of a strategy that make distributed datasets."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from mirrored.data.batch_dims import Dims
from mirrored.data.dataset import DistributedDataset
from mirrored.data.distribute import distribute
from mirrored.data.input_context import InputContext
from mirrored.data.shares import Distribution
from mirrored.data.streams import PipelineDataset
from mirrored.strategy.calls import CheckedCalls
from towers.options import instead_of


class DistributedData(CheckedCalls):
    """The part of a strategy that shares out data among its towers."""

    _distribution: Distribution
    _seed: int | None

    @instead_of(options="distribute_dataset(dataset, global_batch_size) needs none")
    def distribute_dataset(
        self,
        dataset: Any,
        global_batch_size: int | None = None,
        *,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        stand_in: bool = False,
        batch_dims: Dims = None,
    ) -> DistributedDataset:
        """Share out every global batch of ``dataset`` among the towers.

        Step k takes the same examples whatever the number of towers; each tower gets a contiguous share, cut
        as ``numpy.array_split`` cuts, empty when there are fewer examples than towers. Nothing is repeated or
        dropped. Random augmentation in ``dataset[i]`` is seeded by (seed, epoch, i).

        Args:
            dataset: has ``__getitem__`` and ``__len__``; or a tuple or dict of tensors of one length, which stands for
                their slices (a list is one of examples); or an ``IterableDataset``, the same on all towers;
                or a ``DataLoader`` whose batch size is the global one, whose settings are kept.
            global_batch_size: examples per step over all towers; left out for a ``DataLoader``.
            shuffle: a new order every epoch, from (seed, epoch).
            drop_last: leave out an incomplete last batch.
            seed: default the initial seed of the generator that a ``DataLoader`` or its sampler was given, else the
                strategy's seed, else 0.
            collate_fn: makes a batch of a list of examples; for an empty share, of one example and of two, of which
                what grows with them is left out.
            num_workers: loader processes of each tower.
            stand_in: give a tower whose share is empty one example of another tower that counts nothing
                (:mod:`mirrored.stand_in`), for models that cannot take an empty batch.
            batch_dims: what is per example in batches that come ready made (a ``DataLoader`` with
                ``batch_size=None``), see :mod:`mirrored.data.batch_dims`. Default: what is certain.

        Raises:
            ValueError, TypeError: the arguments contradict each other or the data.
            DisagreementError: when an epoch begins, on all towers, when they were given data of another length
                or other settings, or are at different places in it.
        """
        return distribute(
            self._distribution,
            dataset,
            global_batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            seed=operator.index(seed) if seed is not None else None,
            default_seed=operator.index(self._seed) if self._seed is not None else 0,
            collate_fn=collate_fn,
            num_workers=num_workers,
            stand_in=stand_in,
            batch_dims=batch_dims,
        )

    experimental_distribute_dataset = distribute_dataset

    @instead_of(dataset_fn="fn=", options="leave it out")
    def distribute_datasets_from_function(
        self, fn: Callable[[InputContext], Any], *, stand_in: bool = False, batch_dims: Dims = None
    ) -> DistributedDataset:
        """Batches from the pipeline that ``fn(InputContext)`` builds on each tower.

        The pipelines' batches are the towers' shares as they are. Towers whose pipeline ends first go on with
        empty shares until all have ended.

        Args:
            stand_in, batch_dims: as of :meth:`distribute_dataset`; a stand-in is of the pipeline's own last batch.

        Raises:
            TypeError, ValueError: on all towers, when the number of examples in a batch of one cannot be told.
        """
        towers = self._distribution.comm.size
        pipeline = fn(InputContext(towers, self._distribution.comm.index, towers))
        seed = self._seed if self._seed is not None else 0
        return PipelineDataset(self._distribution, pipeline, seed, stand_in, batch_dims)
