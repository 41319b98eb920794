"""Datasets whose batches are shared out among the towers."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, default_collate

from mirrored import seeds
from mirrored.data.examples import Joined, Key, SeededCollate, SeededExamples
from mirrored.data.order import Order
from mirrored.data.shares import Cut, KnownShares, Share, cut
from mirrored.data.transfer import Batch, to_device
from mirrored.observer import observer
from towers import DisagreementError
from towers.collectives.agreement import announce
from towers.collectives.communicator import Communicator
from towers.health import LOADING


class DistributedDataset(ABC):
    """Yields this tower's share of every global batch; made by ``strategy.distribute_dataset``.

    Iterating again is the next epoch, also after a loop that was left early; nobody calls ``set_epoch``. All
    towers make the same number of steps. Batches are what the collate function makes, on the tower's device;
    a share can be empty (first dimensions of size 0).
    """

    def __init__(
        self, comm: Communicator, cut: Cut, known: KnownShares, seed: int, settings: dict[str, object]
    ) -> None:
        self._comm = comm
        self._cut = cut
        self._known = known
        self._seed = seed
        self._settings = settings
        self._epoch = 0
        self._step = 0
        self._running = False
        self._newest: object = None

    def __iter__(self) -> Iterator[Any]:
        if self._running:
            self._epoch, self._step = self._epoch + 1, 0
        self._running = True
        self._newest = this = object()
        epoch, step = self._epoch, self._step
        self._check_agreement(epoch, step)
        in_hand_outside = self._known.in_hand
        try:
            for batch, share in self._comm.health.each(LOADING, self._batches(epoch, step)):
                step += 1
                if self._newest is this:
                    self._step = step
                self._known.drop(this)
                if isinstance(batch, Joined):
                    self._known.hold(this, *batch)
                    batch = batch.whole
                self._known.add(batch, share)
                self._known.in_hand = share
                yield batch
        finally:
            self._known.in_hand = in_hand_outside
            self._known.drop(this)
        if self._newest is this:
            self._epoch, self._step, self._running = epoch + 1, 0, False

    def _batches(self, epoch: int, first: int) -> Iterator[Batch]:
        def load(first: int) -> Iterator[Batch]:
            return to_device(_on_cpu(self._load(epoch, first)), self._comm.device)

        watching = observer()
        return load(first) if watching is None else watching.batches(self, load, first)

    @abstractmethod
    def __len__(self) -> int:
        """Steps of an epoch, the same on all towers.

        Raises:
            TypeError: the data has no length.
        """

    @abstractmethod
    def _load(self, epoch: int, first: int) -> Iterator[Batch]:
        """This tower's shares of the epoch's batches, from batch number ``first`` on."""

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of the epochs up to ``count`` (from 0) that are not done: ``for epoch in train.epochs(20):``.

        In a run that is resumed the first is the epoch that was interrupted, whose loop then yields what is left of it,
        perhaps nothing.
        """
        first = self._epoch + 1 if self._running else self._epoch
        for epoch in range(first, count):
            if (at := self._epoch + self._running) != epoch:
                raise RuntimeError(
                    f"epochs() is at epoch {epoch}, but the data at {at}: loop over the data once in each"
                )
            yield epoch

    def state_dict(self) -> dict[str, int]:
        """Where the next batch comes from: seed, epoch, step. Inside a loop, the batch in hand counts as done.

        Of several iterators the newest counts. After a loop that was left early it still says where the loop
        was left: a run that is resumed from it finishes that epoch.
        """
        return {"seed": self._seed, "epoch": self._epoch, "step": self._step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where :meth:`state_dict` was taken, on any number of towers. All towers load the same.

        Map-style data starts there at once; an iterable is read up to that place again.

        Raises:
            ValueError: something is missing, not a whole number from 0, or the epoch has fewer steps.
        """
        for key in ("seed", "epoch", "step"):
            if not isinstance(state.get(key), int) or (key != "seed" and state[key] < 0):
                raise ValueError(f"state of a distributed dataset: {key} is {state.get(key)!r}")
        with contextlib.suppress(TypeError):  # data without a length
            if state["step"] > len(self):
                raise ValueError(
                    f"state of a distributed dataset: step is {state['step']}, but an epoch of this data has "
                    f"{len(self)} steps; the data or the global batch size is another than when it was saved"
                )
        self._reseed(state["seed"])
        self._epoch, self._step, self._running = state["epoch"], state["step"], False
        self._newest = None

    def _reseed(self, seed: int) -> None:
        self._seed = seed

    def _check_agreement(self, epoch: int, step: int) -> None:
        """See that all towers share out the same data in the same way, from the same place on."""
        if self._comm.size == 1:
            return
        place = {**self._settings, "seed": self._seed, "epoch": epoch, "step": step}
        described = [said.details for said in announce(self._comm, "an epoch of a distributed dataset", place)]
        for tower, other in enumerate(described):
            if other != described[0]:
                raise DisagreementError(
                    "towers begin an epoch with different data, settings or places in it: "
                    f"{other} on tower {tower}, {described[0]} on tower 0; make the same dataset, and call iter(), "
                    "next() and load_state_dict() alike, on every tower"
                )


def _on_cpu(batches: Iterator[Batch]) -> Iterator[Batch]:
    """The same batches, loaded with the CPU as default device, which in a scope is the tower's.

    Loading is seeded and pinned on the CPU, and its processes inherit the default device.
    """
    while True:
        with torch.device("cpu") if torch.get_default_device().type != "cpu" else contextlib.nullcontext():
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


class MapDataset(DistributedDataset):
    """Examples by index: each tower loads its own share only.

    Attributes:
        examples: how many the dataset has.
    """

    def __init__(
        self,
        comm: Communicator,
        cut: Cut,
        known: KnownShares,
        dataset: Any,
        order: Order,
        settings: dict[str, object],
        loader_settings: dict[str, Any],
    ) -> None:
        super().__init__(comm, cut, known, order.seed, settings)
        self.examples = len(dataset)
        self._order = order
        self._sampler = _ShareSampler(order, cut)
        self._generator = torch.Generator()
        collate = loader_settings["collate_fn"]
        if collate is not default_collate:
            collate = SeededCollate(collate, cut)
        self._loader: DataLoader[Any] = DataLoader(
            SeededExamples(dataset),  # type: ignore[arg-type]
            batch_sampler=self._sampler,  # type: ignore[arg-type]
            generator=self._generator,
            **(loader_settings | {"collate_fn": collate}),
        )

    def __len__(self) -> int:
        return len(self._order)

    def _reseed(self, seed: int) -> None:
        super()._reseed(seed)
        self._order.seed = seed

    def _load(self, epoch: int, first: int) -> Iterator[Batch]:
        self._generator.manual_seed(seeds.mix(self._seed, "loader", epoch))
        sizes = self._sampler.start(epoch, first)
        for batch in self._loader:
            total = sizes.popleft()
            start, end = self._cut.bounds(total)
            yield (batch if start < end else cut(batch, 0, 0)), Share(end - start, total)


class _ShareSampler:
    """Asks the loader for this tower's share of each global batch, and tells how large the batch was."""

    def __init__(self, order: Order, cut: Cut) -> None:
        self._order = order
        self._cut = cut
        self.start(0, 0)

    def start(self, epoch: int, first: int) -> deque[int]:
        """Set where the next iteration begins; returns where that one notes the sizes of the global batches."""
        self._sizes: deque[int] = deque()
        self._position = (epoch, first)
        return self._sizes

    def __len__(self) -> int:
        return max(0, len(self._order) - self._position[1])

    def __iter__(self) -> Iterator[list[Key]]:
        return self._requests(*self._position, self._sizes)

    def _requests(self, epoch: int, first: int, sizes: deque[int]) -> Iterator[list[Key]]:
        for indices in self._order.batches(epoch, first):
            sizes.append(len(indices))
            start, end = self._cut.bounds(len(indices))
            # An empty share takes the shape of one example, which is cut away again.
            yield [Key(self._order.seed, epoch, index) for index in indices[start:end] or indices[:1]]
