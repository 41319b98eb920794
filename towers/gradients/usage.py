"""Usage flags: the parameters and units (buckets, sparse gradients) for which towers had gradients in a backward.

[Note: usage flags between GPUs] On CPUs, the flags are part of the buckets' tails, and are available when the buckets
are reduced. Reading a tail from a GPU would make the host wait for the whole backward, in every step with a frozen or
unused parameter. So between GPUs no tower synchronises with the device: hosts gather the flags over Gloo, in parallel
with all other work. Only a tower that has not used every parameter waits for them: for the other hosts, not for a GPU.
A tower that has used all parameters reads them when the next backward starts, to check that towers were in the same
one. (Tested over Gloo. The tests for GPUs are written, but have not run on a GPU.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from towers.collectives.communicator import Communicator

Read = Callable[[], Sequence[float]]
"""Returns for each flag the number of towers that have set it (or a multiple of that). It may make the host wait."""


class Summary(NamedTuple):
    """The message in a backward's last bucket, in addition to the bucket's own flags.

    Attributes:
        touched: the units that this tower has gradients for.
        backward: the backward's identification (:mod:`towers.gradients.pairing`).
    """

    touched: list[bool]
    backward: list[bool]


class Counts:
    """For each flag of one bucket, the number of towers that have set it, or the mean (that number over N).

    Reading them may wait.

    Args:
        read: returns the numbers in the order of the bucket's tail.
        slots: the number of the bucket's slots.
        units: the number of the layout's units.
    """

    def __init__(self, read: Read, slots: int, units: int) -> None:
        self._read = read
        self._touched_at = slots
        self._backward_at = slots + units

    def used(self) -> Sequence[float]:
        """Returns for each slot of the bucket a number that is zero if no tower has used it (see the class)."""
        return self._read()[: self._touched_at]

    def summary(self) -> tuple[list[bool], Sequence[float]]:
        """Returns the units that any tower has touched, and the numbers of the backward, from its last bucket."""
        counts = self._read()
        return [n > 0 for n in counts[self._touched_at : self._backward_at]], counts[self._backward_at :]


def start_gather(channel: Communicator, flags: Sequence[Sequence[bool]]) -> list[Read]:
    """Starts gathering the flags of packed buckets through the hosts (see [Note: usage flags between GPUs]).

    Args:
        flags: each bucket's, of one length on all towers.

    Returns:
        For each bucket, a function that waits for the hosts and returns the counts of its flags. The functions must be
        kept until one of them was called, because they hold the tensors of the collective.
    """
    rows = [torch.tensor(row, dtype=torch.uint8, device="cpu") for row in flags]
    pending, gathered = channel.start_all_gather(torch.cat(rows))

    def read(number: int) -> Sequence[float]:
        pending.wait()
        counts: list[float] = gathered.split([row.numel() for row in rows], dim=1)[number].sum(0).tolist()
        return counts

    return [functools.partial(read, number) for number in range(len(rows))]
