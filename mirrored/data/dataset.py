"""Datasets whose batches are shared out among the towers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from mirrored import seeds
from mirrored.data.examples import Key, SeededExamples
from mirrored.data.order import Order
from mirrored.data.shares import KnownShares, Share, bounds, cut
from mirrored.data.transfer import Batch, to_device
from towers import DisagreementError
from towers.collectives.communicator import Communicator


class DistributedDataset(ABC):
    """Yields this tower's share of every global batch; made by ``strategy.distribute_dataset``.

    Iterating again is the next epoch, also after a loop that was left early; nobody calls ``set_epoch``. All
    towers make the same number of steps. Batches are what the collate function makes, on the tower's device;
    a share can be empty (first dimensions of size 0).
    """

    def __init__(self, comm: Communicator, known: KnownShares, seed: int, settings: dict[str, object]) -> None:
        self._comm = comm
        self._known = known
        self._seed = seed
        self._settings = settings
        self._checked = False
        self._epoch = 0
        self._step = 0
        self._running = False

    def __iter__(self) -> Iterator[Any]:
        self._check_settings()
        if self._running:
            self._epoch, self._step = self._epoch + 1, 0
        self._running = True
        epoch = self._epoch
        for batch, share in to_device(self._load(epoch, self._step), self._comm.device):
            self._known.add(batch, share)
            self._step += 1
            yield batch
        if self._epoch == epoch:
            self._epoch, self._step, self._running = epoch + 1, 0, False

    @abstractmethod
    def __len__(self) -> int:
        """Steps of an epoch, the same on all towers.

        Raises:
            TypeError: the data has no length.
        """

    @abstractmethod
    def _load(self, epoch: int, first: int) -> Iterator[Batch]:
        """This tower's shares of the epoch's batches, from batch number ``first`` on."""

    def state_dict(self) -> dict[str, int]:
        """Where the next batch comes from: seed, epoch, step. Inside a loop, the batch in hand counts as done."""
        return {"seed": self._seed, "epoch": self._epoch, "step": self._step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue where :meth:`state_dict` was taken, on any number of towers.

        Map-style data starts there at once; an iterable is read up to that place again.

        Raises:
            ValueError: something is missing, or not a whole number from 0.
        """
        for key in ("seed", "epoch", "step"):
            if not isinstance(state.get(key), int) or (key != "seed" and state[key] < 0):
                raise ValueError(f"state of a distributed dataset: {key} is {state.get(key)!r}")
        self._reseed(state["seed"])
        self._epoch, self._step, self._running = state["epoch"], state["step"], False

    def _reseed(self, seed: int) -> None:
        self._seed = seed

    def _check_settings(self) -> None:
        """See, once, that all towers share out the same data in the same way."""
        if self._checked or self._comm.size == 1:
            return
        self._checked = True
        described = [data.decode() for data in self._comm.all_gather_bytes(repr(self._settings).encode())]
        for tower, other in enumerate(described):
            if other != described[0]:
                raise DisagreementError(
                    f"distribute_dataset was given different data or settings: {other} on tower {tower}, "
                    f"{described[0]} on tower 0"
                )


class MapDataset(DistributedDataset):
    """Examples by index: each tower loads its own share only."""

    def __init__(
        self,
        comm: Communicator,
        known: KnownShares,
        dataset: Any,
        order: Order,
        settings: dict[str, object],
        loader_settings: dict[str, Any],
    ) -> None:
        super().__init__(comm, known, order.seed, settings)
        self._order = order
        self._sampler = _ShareSampler(order, comm)
        self._generator = torch.Generator()
        self._loader: DataLoader[Any] = DataLoader(
            SeededExamples(dataset),  # type: ignore[arg-type]
            batch_sampler=self._sampler,  # type: ignore[arg-type]
            generator=self._generator,
            **loader_settings,
        )

    def __len__(self) -> int:
        return len(self._order)

    def _reseed(self, seed: int) -> None:
        super()._reseed(seed)
        self._order.seed = seed

    def _load(self, epoch: int, first: int) -> Iterator[Batch]:
        self._generator.manual_seed(seeds.mix(self._seed, "loader", epoch))
        self._sampler.start(epoch, first)
        for batch in self._loader:
            yield self._sampler.share_of(batch)


class _ShareSampler:
    """Asks the loader for this tower's share of each global batch, and remembers how large the batch was."""

    def __init__(self, order: Order, comm: Communicator) -> None:
        self._order = order
        self._comm = comm
        self._position = (0, 0)
        self._sizes: deque[int] = deque()

    def start(self, epoch: int, first: int) -> None:
        self._position = (epoch, first)
        self._sizes.clear()

    def __len__(self) -> int:
        return max(0, len(self._order) - self._position[1])

    def __iter__(self) -> Iterator[list[Key]]:
        epoch, first = self._position
        for indices in self._order.batches(epoch, first):
            self._sizes.append(len(indices))
            start, end = bounds(len(indices), self._comm.size, self._comm.index)
            # An empty share takes the shape of one example, which is cut away again.
            yield [Key(self._order.seed, epoch, index) for index in indices[start:end] or indices[:1]]

    def share_of(self, batch: Any) -> Batch:
        """The batch that belongs to the oldest request, cut to nothing when the share is empty."""
        total = self._sizes.popleft()
        start, end = bounds(total, self._comm.size, self._comm.index)
        return (batch if start < end else cut(batch, 0, 0)), Share(end - start, total)
