"""How variables are cut along dimension 0 (after TensorFlow's ``tf.distribute.experimental.partitioners``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Partitioner(Protocol):
    """Says into how many shards a variable is cut."""

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> Sequence[int]:
        """The number of shards along each dimension; only the first may be more than 1."""
        ...


@dataclass(frozen=True)
class FixedShardsPartitioner:
    """Cuts each variable into a fixed number of shards, or as many as it has rows.

    Args:
        num_shards: at least 1.
    """

    num_shards: int

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> Sequence[int]:
        return _along_rows(shape, self.num_shards)


@dataclass(frozen=True)
class MinSizePartitioner:
    """Cuts variables into as many shards as have a least size each.

    Args:
        min_shard_bytes: the least size of a shard.
        max_shards: the most shards of a variable.
    """

    min_shard_bytes: int = 256 << 10
    max_shards: int = 1

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> Sequence[int]:
        shards = math.ceil(math.prod(shape) * dtype.itemsize / self.min_shard_bytes)
        return _along_rows(shape, min(self.max_shards, shards))


@dataclass(frozen=True)
class MaxSizePartitioner:
    """Cuts variables into shards that have a largest size each.

    Args:
        max_shard_bytes: the largest size of a shard; a single row may be larger.
        max_shards: the most shards of a variable, which goes before the size; default: any number.
    """

    max_shard_bytes: int
    max_shards: int | None = None

    def __call__(self, shape: Sequence[int], dtype: torch.dtype) -> Sequence[int]:
        row = math.prod(shape[1:]) * dtype.itemsize
        shards = math.ceil(shape[0] / max(1, self.max_shard_bytes // max(1, row)))
        return _along_rows(shape, shards if self.max_shards is None else min(self.max_shards, shards))


def _along_rows(shape: Sequence[int], shards: int) -> list[int]:
    return [max(1, min(shards, shape[0])), *(1 for _ in shape[1:])]
