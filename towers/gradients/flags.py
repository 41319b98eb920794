"""The flags of a backward, by way of the hosts: which parameters and which buckets a tower had gradients for.

On CPUs they ride in the buckets' tails. Reading those from a GPU would make the host wait for all of its work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from towers.collectives.communicator import Communicator, Pending
from towers.gradients.buckets import Bucket

Tail = Callable[[], Tensor]
"""Gives the sum of all towers' tails of a bucket; may make the caller wait."""


def known(tail: Tensor | None) -> Tail:
    """A sum that is there already."""
    assert tail is not None
    return lambda: tail


def exchange(channel: Communicator, buckets: Sequence[Bucket], closing: Sequence[bool]) -> tuple[Pending, list[Tail]]:
    """Start to exchange the flags of packed buckets, beside all else; returns their sums.

    Only a tower that has not used every parameter asks for a sum, and has to wait for it.
    """
    flags = [torch.tensor([*bucket.used, *closing], dtype=torch.uint8, device="cpu") for bucket in buckets]
    pending, rows = channel.start_all_gather(torch.cat(flags))
    sizes = [len(flag) for flag in flags]

    def sum_of(number: int) -> Tensor:
        pending.wait()
        own: Tensor = rows.split(sizes, dim=1)[number]
        return own.sum(0)

    return pending, [functools.partial(sum_of, number) for number in range(len(buckets))]
