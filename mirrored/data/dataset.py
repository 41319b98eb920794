"""Datasets whose batches are split among the towers, and moved to their devices.

[Note: data is loaded on the CPU] A scope on a GPU makes it the default device, as ``torch.set_default_device`` does,
and the processes of a loader inherit it. But loaders draw from CPU generators and pin CPU tensors. Data is therefore
loaded with the CPU as the default device.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader

from mirrored.context import refuse_inside_run
from mirrored.data import contents
from mirrored.data.examples import CollatedParts, MapCollate, Request, SeededExamples, some_of
from mirrored.data.order import Epoch, Order
from mirrored.interceptor import interceptor
from mirrored.shares import Batch, Cut, Distribution
from towers.collectives.agreement import announce
from towers.errors import DisagreementError
from towers.health.status import LOADING, BatchInHand
from towers.system import tree as trees
from towers.system.messages import get_logger
from towers.system.profiling import range_
from towers.system.tensors import pinned

log = get_logger("mirrored")


def to_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """Yields the same batches with their tensors on ``device``.

    On an accelerator, the next batch is copied on a separate stream while the current one is used. The copy is from
    pinned memory, so that it runs in parallel. On the CPU, nothing is done. All values except strided CPU tensors are
    moved when the batch is handed over.
    """
    if device.type == "cpu":
        yield from batches
        return
    side = _side_stream(device)
    upcoming: tuple[Batch, torch.Event] | None = None
    for batch, share in batches:
        with side:
            moved = _map(lambda leaf: _copy_ahead(leaf, device), batch)
            copied = side.record_event()
        if upcoming is not None:
            yield _hand_over(*upcoming, device)
        upcoming = (moved, share), copied
    if upcoming is not None:
        yield _hand_over(*upcoming, device)


@functools.cache
def _side_stream(device: torch.device) -> torch.Stream:
    """Returns the stream for all epochs. Memory that was allocated on a stream is reused on that stream only."""
    return torch.Stream(device)


def _map(fn: Callable[[Any], Any], batch: Any) -> Any:
    """Applies ``fn`` to all leaves. A packed sequence is moved as one leaf: it keeps its batch sizes on the CPU."""
    return trees.map_leaves(fn, batch, leaf=PackedSequence)


def _copy_ahead(leaf: Any, device: torch.device) -> Any:
    if isinstance(leaf, PackedSequence):
        return leaf.to(device, non_blocking=True)  # type: ignore[arg-type]
    return pinned(leaf).to(device, non_blocking=True) if _is_plain(leaf, "cpu") else leaf


def _is_plain(leaf: Any, kind: str) -> bool:
    known = type(leaf) in (Tensor, Parameter)  # subclasses may have their own methods
    return known and leaf.device.type == kind and leaf.layout is torch.strided and not leaf.is_nested


def _hand_over(batch: Batch, copied: torch.Event, device: torch.device) -> Batch:
    """Makes the model's stream wait for the copy, and keeps the memory until the model has used it."""
    stream = torch.accelerator.current_stream(device)
    stream.wait_event(copied)
    for leaf in trees.leaves(batch[0]):
        if _is_plain(leaf, device.type) and device.type != "tpu":  # [Note: a TPU has one order], accelerator.py
            leaf.record_stream(stream)
    return _map(lambda leaf: _move(leaf, device), batch[0]), batch[1]


def _move(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device) if isinstance(leaf, (Tensor, PackedSequence)) else leaf  # type: ignore[arg-type]


class DistributedDataset(ABC):
    """Yields this tower's share of every global batch. ``strategy.distribute_dataset`` creates it.

    Each new iteration is the next epoch, even after a loop that ended early; ``set_epoch`` is not needed. All towers
    run the same number of steps. Batches are the results of the collate function, on the tower's device. A share can be
    empty: the dimensions that grow with the examples then have size 0. With ``stand_in=True``, it holds a stand-in
    instead, which does not count.

    Args:
        distribution: how batches are split.
        settings: a description of the data and its batches, as JSON values. Towers compare it, and states contain it.

    Attributes:
        dataset: the data that the script has given; None for a dataset from a function.
        batch_size: the number of examples of a global batch; None if the data or a function determines it.
        hints_at_epochs: whether a hint is logged if the next loop does not use :meth:`epochs`, in a resumed run.
    """

    def __init__(self, distribution: Distribution, seed: int, settings: dict[str, object], dataset: Any = None) -> None:
        self.dataset = dataset
        self.batch_size: Any = settings.get("global_batch_size")
        self._comm = distribution.comm
        self._cut = distribution.cut
        self._known = distribution.known
        self._events = distribution.events
        self._pieces = distribution.pieces
        self._seed = seed
        self._settings = settings
        self._epoch = 0
        self._step = 0
        self._running: Epoch | None = None  # of the newest iterator, until it ends
        self._saved_order: str | None = None
        self.hints_at_epochs = False

    def __iter__(self) -> Iterator[Any]:
        refuse_inside_run("a loop over a distributed dataset", "loop outside, and call run for each batch")
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        if self._running is not None:
            self._epoch, self._step = self._epoch + 1, 0
        step = self._step
        if self.hints_at_epochs and self._comm.index == 0 and (self._epoch or step):
            log.info(
                "the data resume in epoch %d, at step %d. A loop over range(N) would train N further epochs: loop over "
                "train.epochs(N), which leaves out those that are done",
                self._epoch,
                step,
            )
        self.hints_at_epochs = False
        self._running = epoch = self._begin(self._epoch)
        batches = self._batches(epoch, step)  # recorded by `mirrored verify`, also if the check fails
        self._check_agreement(epoch, step)
        if self._saved_order is not None and epoch.digest != self._saved_order:
            raise ValueError(
                f"state of a distributed dataset: epoch {epoch.number} has another order of examples than when the "
                f"state was saved in step {step}, so the run would repeat examples or leave some out; give the sampler "
                "the weights, and random_split or Subset the indices, that they had then"
            )
        self._saved_order = None
        log.debug("epoch %d of a distributed dataset starts at step %d", epoch.number, step)
        health, known = self._comm.health, self._known
        in_script = threading.current_thread() is threading.main_thread()
        loop = health.batches.begin()
        try:
            for batch, share in health.each(LOADING, batches):
                if in_script:
                    health.batches.set(loop, BatchInHand(loop, epoch.number, step))
                step += 1
                if self._running is epoch:
                    self._step = step
                self._pieces.pop(epoch, None)
                if isinstance(batch, CollatedParts):
                    self._pieces[epoch] = batch.pieces()
                    batch = batch.collated
                known.add(batch, share)  # see [Note: batch sizes are sent with the batch]
                known.in_hand.set(loop, share)
                self._events.loaded(share.local, share.total)
                yield batch
        finally:
            known.in_hand.end(loop)
            health.batches.end(loop)
            self._pieces.pop(epoch, None)
        if self._running is epoch:
            self._epoch, self._step, self._running = epoch.number + 1, 0, None

    if not TYPE_CHECKING:  # otherwise, a type checker would accept any attribute

        def __getattr__(self, name):
            from mirrored.foreign_names import missing

            raise missing("DistributedDataset", name)

    def _batches(self, epoch: Epoch, first: int) -> Iterator[Batch]:
        def load(first: int) -> Iterator[Batch]:
            return to_device(_loaded(self._load(epoch, first)), self._comm.device)

        return interceptor().batches(self, load, first)

    @abstractmethod
    def __len__(self) -> int:
        """Returns the number of steps of an epoch, which is the same on all towers.

        Raises:
            TypeError: the data has no length.
        """

    def _begin(self, number: int) -> Epoch:
        """Returns the epoch with a number. The epoch stores its order for all later uses."""
        return Epoch(self._seed, number)

    @abstractmethod
    def _load(self, epoch: Epoch, first: int) -> Iterator[Batch]:
        """Yields this tower's shares of the epoch's batches, from batch number ``first`` on."""

    def epochs(self, count: int) -> Iterator[int]:
        """Yields the numbers of the epochs from 0 that are not done: ``for epoch in train.epochs(20):``.

        In a resumed run, the first is the interrupted epoch. Its loop yields the remaining batches, if any.
        """
        self.hints_at_epochs = False
        first = self._epoch + (self._running is not None)
        for epoch in range(first, count):
            if (at := self._epoch + (self._running is not None)) != epoch:
                raise RuntimeError(
                    f"epochs() is at epoch {epoch}, but the data at {at}: loop over the data once in each"
                )
            yield epoch

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the next batch (seed, epoch and step), and a description of the data and batches.

        Inside a loop, the current batch counts as done. If there are several iterators, the newest counts. After a loop
        that ended early, the state still has that position: a run that resumes from it finishes that epoch.
        """
        state = {"seed": self._seed, "epoch": self._epoch, "step": self._step, "data": dict(self._settings)}
        if self._step:
            order = self._running.digest if self._running is not None else self._saved_order
            state |= {"order": order} if order is not None else {}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from the position of :meth:`state_dict`, on any number of towers. All towers load the same state.

        Map-style data starts at that position at once. An iterable is read again up to that position. At the start of
        an epoch, the data and the batch size may differ from the saved ones. Within an epoch they must be the same, so
        that no example is repeated. As an exception, map-style data may continue with another batch size that divides
        the number of examples that are done. States without ``data`` and ``order``, from older versions, are not
        compared.

        Raises:
            ValueError: an entry is missing or is not a whole number from 0, the data differ, or the epoch has fewer
                steps.
        """
        for key in ("seed", "epoch", "step"):
            if not isinstance(state.get(key), int) or (key != "seed" and state[key] < 0):
                raise ValueError(f"state of a distributed dataset: {key} is {state.get(key)!r}")
        step, order = state["step"], state.get("order")
        if step and "data" in state:
            step, order = self._place(step, state["data"], order)
        with contextlib.suppress(TypeError):  # data without a length
            if step > len(self):
                raise ValueError(
                    f"state of a distributed dataset: step is {step}, but an epoch of this data has "
                    f"{len(self)} steps; the data or the global batch size is another than when it was saved"
                )
        self._seed = state["seed"]
        self._epoch, self._step, self._running = state["epoch"], step, None
        self._saved_order = order if step else None

    def _place(self, step: int, saved: Mapping[str, Any], order: str | None) -> tuple[int, str | None]:
        """Returns the step at which these batches continue after ``step`` ``saved`` batches, and the order to compare.

        Raises:
            ValueError: there is no such step.
        """
        current = self._settings
        if step == saved.get("steps") and current.get("steps") is not None:
            return len(self), None  # that epoch is over, whatever its data were
        names = [name for name in {**saved, **current} if name not in ("steps", "drop_last")]
        different = [name for name in names if saved.get(name) != current.get(name)]
        hint = "load it at the start of an epoch, or continue with the earlier settings"
        if different == ["global_batch_size"] and "examples" in current:
            then, now = saved["global_batch_size"], current["global_batch_size"]
            if isinstance(then, int) and isinstance(now, int) and then > 0:
                if step * then % now == 0:
                    return step * then // now, order
                hint += f", or with a global batch size that divides the {step * then} examples that are done"
        if different:
            changes = ", ".join(f"{name} was {saved.get(name)!r} and is {current.get(name)!r}" for name in different)
            raise ValueError(
                f"state of a distributed dataset: {changes} since it was saved in step {step} of an epoch, so the run "
                f"would repeat examples or leave some out; {hint}"
            )
        return step, order

    def _check_agreement(self, epoch: Epoch, step: int) -> None:
        """Checks that all towers split the same data in the same way, from the same position."""
        if self._comm.size == 1:
            return
        place = {**self._settings, "seed": epoch.seed, "epoch": epoch.number, "step": step, "order": epoch.digest}
        described = announce(self._comm, "an epoch of a distributed dataset", place)
        for tower, other in enumerate(described):
            if other == described[0]:
                continue
            order = other.pop("order"), described[0].pop("order")
            if other == described[0]:
                raise DisagreementError(
                    f"towers start epoch {epoch.number} with different orders of the examples: the sampler's "
                    f"draws, or the indices of a Subset, on tower {tower} ({order[0]}) differ from those on "
                    f"tower 0 ({order[1]}). Draw from torch's, NumPy's or Python's global generators, which are "
                    "seeded identically on all towers while a sampler draws. Create splits outside run, or with "
                    "a generator that has one seed"
                )
            raise DisagreementError(
                f"towers start an epoch with different data, settings or positions: {other} on tower {tower}, "
                f"{described[0]} on tower 0; create the same dataset, and call iter(), next() and "
                "load_state_dict() identically, on every tower"
            )


def _loaded(batches: Iterator[Batch]) -> Iterator[Batch]:
    """Yields the same batches, each loaded in a range of the profiler; see [Note: data is loaded on the CPU]."""
    while True:
        on_cpu = torch.device("cpu") if torch.get_default_device().type != "cpu" else contextlib.nullcontext()
        with range_("mirrored::data"), on_cpu:
            batch = next(batches, None)
        if batch is None:
            return
        yield batch


def settings_of(loader: DataLoader[Any]) -> dict[str, Any]:
    """Returns a loader's own settings, for a loader that loads other batches in the same way."""
    workers = ("num_workers", "worker_init_fn", "multiprocessing_context", "prefetch_factor", "persistent_workers")
    return {name: getattr(loader, name) for name in ("pin_memory", "timeout", *workers)}


class MapDataset(DistributedDataset):
    """A dataset with indices. Each tower loads only its own share, or the batch's first example for an empty share.

    Attributes:
        examples: the number of examples of the dataset.
    """

    def __init__(
        self, distribution: Distribution, loader: DataLoader[Any], order: Order, seed: int, settings: dict[str, object]
    ) -> None:
        super().__init__(distribution, seed, settings, loader.dataset)
        self.examples = len(loader.dataset)  # type: ignore[arg-type]
        self._order = order
        self._sampler = _ShareSampler(order, self._cut)
        self._generator = torch.Generator()
        self._loader: DataLoader[Any] = DataLoader(
            SeededExamples(loader.dataset),  # type: ignore[arg-type]
            batch_sampler=self._sampler,  # type: ignore[arg-type]
            collate_fn=MapCollate(loader.collate_fn, self._cut),  # type: ignore[arg-type]
            generator=self._generator,
            **settings_of(loader),
        )

    def __len__(self) -> int:
        return len(self._order)

    def _begin(self, number: int) -> Epoch:
        return self._order.epoch(self._seed, number, self.dataset)

    def _load(self, epoch: Epoch, first: int) -> Iterator[Batch]:
        loads = contents.LOADS if self._comm.size > 1 else 0
        loaded = self._start(epoch, first, loads)
        if loads and (described := next(loaded, None)) is not None:
            data = f"epoch {epoch.number} of a distributed dataset"
            if contents.tower_that_differs(contents.gather(self._comm, data, described[0])) is not None:
                described = next(self._start(epoch, first, contents.LOADS_BEFORE_AN_ERROR))
                contents.compare(contents.gather(self._comm, data, described[0]), data)
                loaded = self._start(epoch, first, 0)
        yield from loaded

    def _start(self, epoch: Epoch, first: int, loads: int) -> Iterator[Any]:
        """Starts the loader at a batch. If ``loads`` is not 0, it first yields descriptions, see :class:`Request`."""
        self._generator.manual_seed(epoch.seed_of("loader"))
        self._sampler.place = epoch, first, loads
        return iter(self._loader)


class _ShareSampler:
    """Requests this tower's share of each global batch from the loader.

    Attributes:
        place: the start of the next iteration: the arguments of :meth:`Order.batches`, and how often some examples of
            the first batch are loaded to describe them before it.
    """

    def __init__(self, order: Order, cut: Cut) -> None:
        self._order = order
        self._cut = cut
        self.place = Epoch(0, 0), 0, 0

    def __iter__(self) -> Iterator[Request]:
        epoch, first, loads = self.place
        for indices in self._order.batches(epoch, first):
            if loads:
                yield Request(epoch.seed, epoch.number, some_of(indices), len(indices), loads)
                loads = 0
            start, end = self._cut.bounds(len(indices))
            yield Request(epoch.seed, epoch.number, indices[start:end] or indices[:1], len(indices))
