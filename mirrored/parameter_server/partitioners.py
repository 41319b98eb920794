"""Partitioners, which split variables along dimension 0.

They follow TensorFlow's ``tf.distribute.experimental.partitioners``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Partitioner(Protocol):
    """A function that returns the number of shards of a variable."""

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> Sequence[int]:
        """Returns the number of shards along each dimension. Only the first may be more than 1."""
        ...


@dataclass(frozen=True)
class FixedShardsPartitioner:
    """Splits each variable into a fixed number of shards, or as many as it has rows if these are fewer.

    Args:
        num_shards: the number of shards, at least 1.
    """

    num_shards: int

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> Sequence[int]:
        return _along_rows(shape, self.num_shards)


@dataclass(frozen=True)
class MinSizePartitioner:
    """Splits variables into one shard per ``min_shard_bytes`` of their size, rounded up.

    Args:
        min_shard_bytes: the size per shard, in bytes. A shard can be smaller because of the rounding.
        max_shards: the maximum number of shards of a variable.
    """

    min_shard_bytes: int = 256 << 10
    max_shards: int = 1

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> Sequence[int]:
        shards = math.ceil(math.prod(shape) * dtype.itemsize / self.min_shard_bytes)
        return _along_rows(shape, min(self.max_shards, shards))


@dataclass(frozen=True)
class MaxSizePartitioner:
    """Splits variables into shards with a maximum size each.

    Args:
        max_shard_bytes: the maximum size of a shard, in bytes. A single row may be larger.
        max_shards: the maximum number of shards of a variable, even if they become larger. Default: no limit.
    """

    max_shard_bytes: int
    max_shards: int | None = None

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> Sequence[int]:
        row = math.prod(shape[1:]) * dtype.itemsize
        shards = math.ceil(shape[0] / max(1, self.max_shard_bytes // max(1, row)))
        return _along_rows(shape, shards if self.max_shards is None else min(self.max_shards, shards))


def _along_rows(shape: Sequence[int], shards: int) -> list[int]:
    return [max(1, min(shards, shape[0])), *(1 for _ in shape[1:])]
