"""Usage flags: which parameters and which units (buckets, sparse gradients) towers had gradients for in a backward.

[Note: usage flags between GPUs] On CPUs the flags ride in the buckets' tails, and are there when the buckets are
reduced. Reading a tail from a GPU would make the host wait for all of the backward, in every step with a frozen or
unused parameter. So between GPUs nobody synchronises with the device: hosts gather the flags over Gloo, beside all
else. Only a tower that has not used every parameter waits for them, for the other hosts and not for a GPU; a tower that
has used all reads them when the next backward begins, to see that towers were in the same one. (Tested over Gloo; the
tests for GPUs are written, and have had no GPU.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from towers.collectives.communicator import Communicator

Read = Callable[[], Sequence[float]]
"""Returns for each flag how many towers have set it (or a multiple of that); it may make the host wait."""


class Summary(NamedTuple):
    """The message of the last bucket of a backward, beside its own flags.

    Attributes:
        touched: the units that this tower has gradients for.
        backward: which backward it is (:mod:`towers.gradients.pairing`).
    """

    touched: list[bool]
    backward: list[bool]


class Counts:
    """For each flag of one bucket how many towers have set it, or the mean (that number over N); asking may wait.

    Args:
        read: gives the numbers in the order of the bucket's tail.
        slots: how many slots the bucket has.
        units: how many units the layout has.
    """

    def __init__(self, read: Read, slots: int, units: int) -> None:
        self._read = read
        self._touched_at = slots
        self._backward_at = slots + units

    def used(self) -> Sequence[float]:
        """For each slot of the bucket a number that is zero where no tower has used it (see the class)."""
        return self._read()[: self._touched_at]

    def summary(self) -> tuple[list[bool], Sequence[float]]:
        """From a backward's last bucket: which units any tower has touched, and the numbers of the backward."""
        counts = self._read()
        return [n > 0 for n in counts[self._touched_at : self._backward_at]], counts[self._backward_at :]


def start_gather(channel: Communicator, flags: Sequence[Sequence[bool]]) -> list[Read]:
    """Start to gather the flags of packed buckets through the hosts (see [Note: usage flags between GPUs]).

    Args:
        flags: each bucket's, of one length on all towers.

    Returns:
        For each bucket a function that waits for the hosts and gives the counts of its flags. To be kept until one of
        them was called: they hold the tensors of the collective.
    """
    rows = [torch.tensor(row, dtype=torch.uint8, device="cpu") for row in flags]
    pending, gathered = channel.start_all_gather(torch.cat(rows))

    def read(number: int) -> Sequence[float]:
        pending.wait()
        counts: list[float] = gathered.split([row.numel() for row in rows], dim=1)[number].sum(0).tolist()
        return counts

    return [functools.partial(read, number) for number in range(len(rows))]
