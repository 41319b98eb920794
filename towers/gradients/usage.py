"""Usage flags: which parameters and which units (buckets, sparse gradients) towers had gradients for in a backward.

[Note: usage flags between GPUs] On CPUs the flags ride in the buckets' tails, and are there when the buckets are
reduced. Reading a tail from a GPU would make the host wait for the whole backward, in every step with a frozen or
unused parameter. So between GPUs nobody synchronises with the device: hosts exchange the flags over Gloo, beside all
else. Only a tower that has not used every parameter waits for them, for the other hosts and not for a GPU; a tower that
has used all reads them when the next backward begins, to see that towers were in the same one. (Tested over Gloo; the
tests for GPUs are written, and have had no GPU.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from towers.collectives.communicator import Communicator
from towers.gradients.buckets import Bucket


def exchange(channel: Communicator, buckets: Sequence[Bucket], closing: Sequence[bool]) -> Callable[[int], Tensor]:
    """Start to exchange the flags of packed buckets through the hosts (see [Note: usage flags between GPUs]).

    Args:
        closing: what the bucket that closes a backward carries beside its own flags.

    Returns:
        What waits for the hosts, and gives the sum over all towers of the flags of one of the buckets, by its place
        among these. To be kept until then, for it has the tensors of the collective.
    """
    flags = [torch.tensor([*bucket.used, *closing], dtype=torch.uint8, device="cpu") for bucket in buckets]
    pending, rows = channel.start_all_gather(torch.cat(flags))

    def sum_of(number: int) -> Tensor:
        pending.wait()
        column: Tensor = rows.split([own.numel() for own in flags], dim=1)[number]
        return column.sum(0)

    return sum_of
