"""Usage flags: the parameters and units (buckets, sparse gradients) for which towers had gradients in a backward.

[Note: usage flags between GPUs] On CPUs, the flags are part of the buckets' tails, and are available when the buckets
are reduced. Reading a tail from a GPU would make the host wait for the whole backward, in every step with a frozen or
unused parameter. So between GPUs no tower synchronises with the device: hosts gather the flags over Gloo, in parallel
with all other work. Only a tower that has not used every parameter waits for them: for the other hosts, not for a GPU.
Any other tower needs them only to check that towers were in the same backward, and reads them when they are there, at
the latest when the third backward after theirs starts. On an H200, reading them before the optimizer's step took 2 ms
of a step of 6 ms: the host waited for the other towers' hosts, which had yet to queue their work.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from towers.collectives.communicator import Communicator, from_bytes

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


_TEXT_BYTES = 96


class Gather:
    """The flags of packed buckets, on their way through the hosts (see [Note: usage flags between GPUs]).

    It must be kept until it is done, because it holds the tensors of the collective.

    Args:
        channel: the towers'.
        flags: each bucket's, of one length on all towers.
        backward: this tower's in words, for messages.
    """

    def __init__(self, channel: Communicator, flags: Sequence[Sequence[bool]], backward: str) -> None:
        self._rows = [torch.tensor(row, dtype=torch.uint8, device="cpu") for row in flags]
        self._rows.append(from_bytes(backward.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")))
        self._pending, self._gathered = channel.start_all_gather(torch.cat(self._rows))

    def is_done(self) -> bool:
        """Returns whether reading does not wait for other hosts."""
        return self._pending.is_done()

    def read(self, bucket: int) -> Sequence[float]:
        """Waits for the other hosts, and returns the counts of a bucket's flags."""
        counts: list[float] = self._of_all(bucket).sum(0).tolist()
        return counts

    def backwards(self) -> list[bytes]:
        """Returns every tower's backward in words."""
        return [row.numpy().tobytes().rstrip(b"\0") for row in self._of_all(-1)]

    def _of_all(self, number: int) -> torch.Tensor:
        self._pending.wait()
        rows: Sequence[torch.Tensor] = self._gathered.split([row.numel() for row in self._rows], dim=1)
        return rows[number]
