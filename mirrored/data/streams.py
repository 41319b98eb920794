"""Data without indices: iterables, and pipelines that the user builds for each tower."""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from mirrored import seeds
from mirrored.data import contents
from mirrored.data.batch_dims import BatchDims, Dims
from mirrored.data.dataset import DistributedDataset, settings_of
from mirrored.data.examples import CollatedParts, StreamBatch, StreamCollate
from mirrored.data.order import Epoch, is_ready_made, tell_epoch
from mirrored.shares import Batch, Cut, Distribution, Share
from towers.collectives.agreement import announce
from towers.collectives.communicator import Communicator
from towers.errors import DisagreementError


def _counted(
    comm: Communicator,
    source: Iterable[Any],
    stream: seeds.Stream,
    kind: str,
    count: Callable[[Any], int],
    describe: Callable[[Any], list[Any]] | None = None,
) -> Iterator[tuple[int, Any, list[int]]]:
    """Yields numbers from 0, a batch, and every tower's number of examples in it, until no tower has a batch.

    The towers thus agree at every step whether there is a next batch, and on its number of examples.

    Args:
        stream: the random numbers of ``source``.
        kind: the data's name in messages.
        count: returns the number of examples of a batch. A tower without a batch has None and the number -1.
        describe: returns the description of a batch that must be equal on all towers.

    Raises:
        TypeError, ValueError: on all towers: ``count`` fails on one of them.
        DisagreementError: on all towers: their batches have equally many examples, but different ones.
    """
    with stream:
        batches = iter(source)
    for step in itertools.count():
        with stream:
            batch = next(batches, None)
        local, error = -1, None
        if batch is not None:
            try:
                local = count(batch)
            except (TypeError, ValueError) as problem:
                error = problem
        counts = [local]
        if comm.size > 1:
            described = describe(batch) if describe is not None and local > 0 else []
            announced = announce(comm, f"batch {step} of {kind}", [local, described], error=error)
            counts = [number for number, _ in announced]
            if min(counts) == max(counts):
                contents.compare([other for _, other in announced], f"batch {step} of {kind}")
        elif error is not None:
            raise error
        if max(counts) < 0:
            return
        yield step, batch, counts


def _total(loaded: StreamBatch) -> int:
    return loaded.batch[1].total


class StreamDataset(DistributedDataset):
    """An iterable dataset: every tower reads the whole stream and keeps its share of each global batch.

    The stream must be the same on all towers. It uses random streams with the same seed on every tower. At every step,
    the towers agree whether there is a next batch, and on its number of examples.

    Args:
        dims: the batch dimensions of ready-made batches; None to infer them.
    """

    def __init__(
        self, distribution: Distribution, loader: DataLoader[Any], seed: int, settings: dict[str, object], dims: Dims
    ) -> None:
        super().__init__(distribution, seed, settings, loader.dataset)
        self._loader = copy.copy(loader)  # the script's loader is the key under which this object is found
        self._ready_made = ReadyMade(self._cut, dims) if is_ready_made(loader) else None
        self._sampler = None if isinstance(loader.dataset, IterableDataset) else loader.sampler

    def __len__(self) -> int:
        return len(self._loader)

    def _begin(self, number: int) -> Epoch:
        sampler = self._sampler if isinstance(self._sampler, Sized) else None  # others may never end
        return Epoch(self._seed, number, sampler, self._loader.dataset)

    def _load(self, epoch: Epoch, first: int) -> Iterator[Batch]:
        source, ready_made = self._loader, self._ready_made
        tell_epoch(source.dataset, epoch.number)
        collate: Any = source.collate_fn if ready_made is not None else StreamCollate(source.collate_fn, self._cut)
        loader: DataLoader[Any] = DataLoader(
            source.dataset,
            batch_size=source.batch_size,
            drop_last=source.drop_last,
            sampler=self._sampler if epoch.sampled is None else epoch.sampled,
            collate_fn=collate,
            generator=torch.Generator().manual_seed(epoch.seed_of("loader")),
            # Persistent workers would keep the dataset, and the random streams, of their first epoch.
            **(settings_of(source) | {"persistent_workers": False}),
        )
        stream = seeds.Stream(epoch.seed_of("stream"))
        count = ready_made.examples if ready_made is not None else _total
        describe = contents.describe if ready_made is not None else operator.attrgetter("described")
        for step, loaded, totals in _counted(self._comm, loader, stream, "a stream", count, describe):
            self._check_totals(step, totals)
            if step >= first:
                yield ready_made.share(loaded, totals[0]) if ready_made is not None else loaded.batch

    def _check_totals(self, step: int, totals: Sequence[int]) -> None:
        """Checks that all towers count equally many examples in a batch.

        Raises:
            DisagreementError: the numbers differ.
        """
        if min(totals) == max(totals):
            return
        if min(totals) < 0:
            ended = ", ".join(str(tower) for tower, count in enumerate(totals) if count < 0)
            what = f"the stream has ended after {step} batches on tower {ended}, but not on the others"
        else:
            counts = ", ".join(f"{count} on tower {tower}" for tower, count in enumerate(totals))
            what = f"batch {step} of the stream has different numbers of examples: {counts}"
        raise DisagreementError(
            f"{what}; an IterableDataset or a loader of ready batches must give every tower the same examples (each "
            "takes its share of them): use distribute_datasets_from_function for streams that differ"
        )


class ReadyMade:
    """Splits ready-made batches into shares.

    Args:
        dims: the batch dimensions; None to infer them.
    """

    def __init__(self, cut: Cut, dims: Dims) -> None:
        self._cut = cut
        self._dims = BatchDims(dims)
        self.examples = self._dims.examples

    def share(self, batch: Any, total: int) -> Batch:
        """Returns this tower's share of a global batch whose examples were counted."""
        start, end = self._cut.bounds(total)
        if start == end:
            return self.nothing(batch, total)
        return self.uncut(self._dims.cut(batch, start, end), end - start, total)

    def nothing(self, batch: Any, total: int) -> Batch:
        """Returns a share without examples, or a stand-in, in the form of a batch whose examples were counted."""
        stand_in = self._cut.stand_in and total > 0 and self.examples(batch) > 0
        return self._dims.cut(batch, 0, int(stand_in)), Share(0, total, stand_in, self._cut.stand_in)

    def uncut(self, share: Any, local: int, total: int) -> Batch:
        """Returns a whole share. If the user gave ``batch_dims``, its virtual towers' parts are split accordingly."""
        batch = share
        if self._cut.virtual and self._dims.are_given:
            cuts = [(start, end) for start, end in self._cut.parts_of(local) if start < end]
            batch = CollatedParts(share, tuple(self._dims.cut(share, start, end) for start, end in cuts))
        return batch, Share(local, total, may_stand_in=self._cut.stand_in)


class PipelineDataset(DistributedDataset):
    """Batches of each tower's own pipeline. The pipelines may have different lengths.

    A tower whose pipeline has ended continues with empty shares until all have ended. Each pipeline draws from its own
    random stream, which is a different one in every epoch.

    Args:
        dims: the batch dimensions; None to infer them.
    """

    def __init__(self, distribution: Distribution, pipeline: Iterable[Any], seed: int, dims: Dims) -> None:
        super().__init__(distribution, seed, {"pipelines": distribution.comm.size})
        self._pipeline = pipeline
        self._ready_made = ReadyMade(self._cut, dims)

    def __len__(self) -> int:
        raise TypeError("datasets from a function have no common length; it is agreed step by step")

    def _load(self, epoch: Epoch, first: int) -> Iterator[Batch]:
        tell_epoch(self._pipeline, epoch.number)
        # A separate stream, so that a run that resumes within the epoch reads the same order again.
        stream = seeds.Stream(seeds.mix(epoch.seed, "pipeline", self._comm.index, epoch.number))
        template: Any = None
        count = self._ready_made.examples
        for step, batch, counts in _counted(self._comm, self._pipeline, stream, "a dataset from a function", count):
            if step == 0 and min(counts) < 0:
                # No batch has the shapes of an empty share. All towers detect this in the same step.
                empty = ", ".join(str(tower) for tower, count in enumerate(counts) if count < 0)
                raise ValueError(f"the pipeline of tower {empty} has no batch at all; each needs at least one")
            local, total = counts[self._comm.index], sum(max(each, 0) for each in counts)
            if local > 0 or template is None:
                template = batch
            if step >= first:
                ready = self._ready_made
                yield ready.uncut(batch, local, total) if local > 0 else ready.nothing(template, total)
