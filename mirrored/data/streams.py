"""Data without indices: iterables, and pipelines that the user builds for each tower."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from mirrored import seeds
from mirrored.data.dataset import DistributedDataset
from mirrored.data.examples import CollateShare
from mirrored.data.order import tell_epoch
from mirrored.data.shares import Cut, KnownShares, Share, count_examples, cut
from mirrored.data.transfer import Batch
from towers import DisagreementError
from towers.collectives.agreement import announce
from towers.collectives.communicator import Communicator


class StreamDataset(DistributedDataset):
    """An iterable dataset: every tower reads the whole stream and keeps its share of each global batch.

    The stream must be the same on all towers; it runs on random streams seeded alike everywhere. Whether
    there is a next batch is agreed at every step.
    """

    def __init__(
        self,
        comm: Communicator,
        cut: Cut,
        known: KnownShares,
        loader: DataLoader[Any],
        seed: int,
        settings: dict[str, object],
    ) -> None:
        super().__init__(comm, cut, known, seed, settings)
        self._dataset = loader.dataset
        self._in_batches = loader.batch_size is None and loader.batch_sampler is None
        collate = loader.collate_fn if loader.collate_fn is not None else default_collate
        share = CollateShare(collate, cut)
        self._generator = torch.Generator()
        self._loader: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_size=loader.batch_size,
            drop_last=loader.drop_last,
            sampler=None if isinstance(loader.dataset, IterableDataset) else loader.sampler,
            collate_fn=collate if self._in_batches else share,
            generator=self._generator,
            # Workers that live on would keep the dataset, and the random streams, of their first epoch.
            **(settings_of(loader) | {"persistent_workers": False}),
        )

    def __len__(self) -> int:
        return len(self._loader)

    def _load(self, epoch: int, first: int) -> Iterator[Batch]:
        tell_epoch(self._dataset, epoch)
        self._generator.manual_seed(seeds.mix(self._seed, "loader", epoch))
        stream = seeds.Stream(seeds.mix(self._seed, "stream", epoch))
        with stream:
            batches = iter(self._loader)
        step = 0
        while True:
            with stream:
                batch = next(batches, None)
            self._agree(batch is not None, step)
            if batch is None:
                return
            step += 1
            if step > first:
                yield self._share_of_batch(batch) if self._in_batches else (batch[0], Share(*batch[1:]))

    def _share_of_batch(self, batch: Any) -> Batch:
        total = count_examples(batch)
        start, end = self._cut.bounds(total)
        return cut(batch, start, end), Share(end - start, total)

    def _agree(self, has_batch: bool, step: int) -> None:
        if self._comm.size == 1:
            return
        found = [said.details for said in announce(self._comm, f"batch {step} of a stream", has_batch)]
        if any(found) and not all(found):
            ended = ", ".join(str(tower) for tower, has in enumerate(found) if not has)
            raise DisagreementError(
                f"the stream has ended after {step} batches on tower {ended}, but not on the others; an "
                "IterableDataset must give every tower the same examples (each takes its own share of them): use "
                "distribute_datasets_from_function for streams that differ"
            )


class PipelineDataset(DistributedDataset):
    """Batches that each tower's own pipeline makes; the pipelines may have different lengths.

    Towers whose pipeline has ended go on with empty shares until all have ended. Each runs on a random stream of its
    own, another one in every epoch.
    """

    def __init__(self, comm: Communicator, cut: Cut, known: KnownShares, pipeline: Iterable[Any], seed: int) -> None:
        super().__init__(comm, cut, known, seed, {})
        self._pipeline = pipeline

    def __len__(self) -> int:
        raise TypeError("datasets from a function have no common length; it is agreed step by step")

    def _load(self, epoch: int, first: int) -> Iterator[Batch]:
        tell_epoch(self._pipeline, epoch)
        # A stream of its own, so that a run which goes on in the middle of the epoch reads the same order again.
        stream = seeds.Stream(seeds.mix(self._seed, "pipeline", self._comm.index, epoch))
        with stream:
            batches = iter(self._pipeline)
        template: Any = None
        step = 0
        while True:
            with stream:
                batch = next(batches, None)
            local = count_examples(batch) if batch is not None else -1
            said = announce(self._comm, f"batch {step} of a dataset from a function", local)
            counts = [other.details for other in said]
            if max(counts) < 0:
                return
            if step == 0 and min(counts) < 0:
                # No batch to take the shapes of an empty share from; all towers see it in the same step.
                empty = ", ".join(str(tower) for tower, count in enumerate(counts) if count < 0)
                raise ValueError(f"the pipeline of tower {empty} has no batch at all; each needs at least one")
            template = batch if batch is not None else template
            step += 1
            share = Share(max(local, 0), sum(max(count, 0) for count in counts))
            if step > first:
                yield (batch if batch is not None else cut(template, 0, 0)), share


def settings_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """A loader's own settings, for a loader that loads other batches in the same way."""
    settings: dict[str, Any] = {
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "timeout": loader.timeout,
        "worker_init_fn": loader.worker_init_fn,
        "multiprocessing_context": loader.multiprocessing_context,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
    }
    return settings
