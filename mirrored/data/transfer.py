"""Moves batches to the tower's device before they are used."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.nn.utils.rnn import PackedSequence

from mirrored.shares import Batch
from towers.system import tree as trees
from towers.system.host_copy import pinned


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
        if _is_plain(leaf, device.type) and device.type != "tpu":  # see [Note: a TPU has one order]
            leaf.record_stream(stream)
    return _map(lambda leaf: _move(leaf, device), batch[0]), batch[1]


def _move(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device) if isinstance(leaf, (Tensor, PackedSequence)) else leaf  # type: ignore[arg-type]
