"""Usage flags: which parameters and which units (buckets, sparse gradients) towers had gradients for in a backward.

[Note: usage flags between GPUs] On CPUs the flags ride in the buckets' tails, and are there when the buckets are
reduced. Reading a tail from a GPU would make the host wait for the whole backward, in every step with a frozen or
unused parameter. So between GPUs nobody synchronises with the device: hosts exchange the flags over Gloo, beside all
else. Only a tower that has not used every parameter waits for them, for the other hosts and not for a GPU; a tower that
has used all reads them when the next backward begins, to see that towers were in the same one. (Tested over Gloo; the
tests for GPUs are written, and have had no GPU.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from towers.collectives.communicator import Communicator, Pending
from towers.gradients.buckets import Bucket

TailSum = Callable[[], Tensor]
"""Gives the sum of all towers' tails of a bucket; may make the caller wait."""


class UsageFlags:
    """The flags are reduced with the gradients, in the buckets' tails.

    Attributes:
        in_tails: whether they are.
    """

    in_tails = True

    def start(self, buckets: Sequence[Bucket], closing: Sequence[bool]) -> None:
        """Start to exchange the flags of packed buckets.

        Args:
            closing: what the bucket that closes a backward carries beside its own flags.
        """

    def sums(self, buckets: Sequence[Bucket], tails: Sequence[Tensor]) -> list[TailSum]:
        """The sum over all towers of every bucket's tail, after the buckets were reduced.

        Args:
            tails: as they were reduced.
        """
        return [functools.partial(lambda total: total, tail) for tail in tails]


class FlagsThroughHosts(UsageFlags):
    """The hosts gather the flags (see [Note: usage flags between GPUs])."""

    in_tails = False

    def __init__(self, channel: Communicator) -> None:
        self._channel = channel
        self._pending: Pending | None = None  # keeps the tensors of a collective that nobody may have awaited
        self._rows = torch.empty(0, device="cpu")

    def start(self, buckets: Sequence[Bucket], closing: Sequence[bool]) -> None:
        flags = [torch.tensor([*bucket.used, *closing], dtype=torch.uint8, device="cpu") for bucket in buckets]
        self._pending, self._rows = self._channel.start_all_gather(torch.cat(flags))

    def sums(self, buckets: Sequence[Bucket], tails: Sequence[Tensor]) -> list[TailSum]:
        pending, rows = self._pending, self._rows
        assert pending is not None
        sizes = [len(bucket.used) + bucket.closing for bucket in buckets]

        def sum_of(number: int) -> Tensor:
            pending.wait()
            column: Tensor = rows.split(sizes, dim=1)[number]
            return column.sum(0)

        return [functools.partial(sum_of, number) for number in range(len(buckets))]


def usage_flags(channel: Communicator) -> UsageFlags:
    """The way for the towers of ``channel``."""
    # see [Note: usage flags between GPUs]
    return FlagsThroughHosts(channel) if channel.device.type != "cpu" else UsageFlags()
