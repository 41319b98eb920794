"""How many examples the arguments of a step hold: as the table of shares knows, else as their arrays and lists say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mirrored.shares import KnownShares
from towers.system import tree as trees


def local_examples(known: KnownShares, batch: Sequence[Any]) -> int:
    """The number of this tower's examples in the arguments of a step; of several batches or arrays, in the first one.

    Raises:
        TypeError: it cannot be told.
    """
    if shares := known.of(batch):
        return shares[0].local
    if sizes := _sizes(batch):
        return sizes[0]
    raise TypeError("the number of examples in the arguments of strategy.backward cannot be told")


def is_empty(known: KnownShares, batch: Sequence[Any]) -> bool:
    """Whether the arguments of a step certainly hold no example."""
    sizes = [share.entries for share in known.of(batch)] or _sizes(batch)
    return bool(sizes) and not any(sizes)


def is_array(value: Any) -> bool:
    """Whether a value is a tensor or an array of NumPy."""
    return isinstance(value, torch.Tensor) or type(value).__name__ == "ndarray"


def _sizes(batch: Sequence[Any]) -> list[int]:
    """How many entries the arrays among the arguments of a step have, or the lists where there are no arrays."""
    arrays = [int(leaf.shape[0]) for leaf in trees.leaves(batch) if is_array(leaf) and len(leaf.shape)]
    return arrays or [len(value) for value in batch if isinstance(value, list)]
