"""Moving batches to the tower's device, ahead of their use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from mirrored.data.shares import Share
from towers import tree as trees

Batch = tuple[Any, Share]


def to_device(batches: Iterator[Batch], device: torch.device) -> Iterator[Batch]:
    """The same batches with their tensors on ``device``.

    On a GPU the next batch is copied on a stream of its own while the current one is used (from pinned memory
    the copy really runs beside); on the CPU nothing is done.
    """
    if device.type == "cpu":
        yield from batches
        return
    side = torch.cuda.Stream(device)
    upcoming: Batch | None = None
    for batch, share in batches:
        with torch.cuda.stream(side):
            moved = trees.map_leaves(lambda leaf: _copy(leaf, device), batch)
        if upcoming is not None:
            yield _hand_over(upcoming, side, device)
        upcoming = moved, share
    if upcoming is not None:
        yield _hand_over(upcoming, side, device)


def _copy(leaf: Any, device: torch.device) -> Any:
    return leaf.to(device, non_blocking=True) if isinstance(leaf, torch.Tensor) else leaf


def _hand_over(batch: Batch, side: torch.cuda.Stream, device: torch.device) -> Batch:
    """Let the model's stream wait for the copy, and keep the memory until the model has used it."""
    stream = torch.cuda.current_stream(device)
    stream.wait_stream(side)
    for leaf in trees.leaves(batch[0]):
        if isinstance(leaf, torch.Tensor):
            leaf.record_stream(stream)
    return batch
