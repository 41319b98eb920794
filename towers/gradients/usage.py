"""Usage flags: the parameters and units (buckets, sparse gradients) for which towers had gradients in a backward.

[Note: usage flags between GPUs] On CPUs, the flags are part of the buckets' tails, and are available when the buckets
are reduced. Reading a tail from a GPU would make the host wait for the whole backward. But a tower that has a gradient
for every trainable parameter has nothing to learn before the optimizer's step: no tower can have more. Between GPUs,
therefore:

- Hosts gather the flags of each backward over Gloo, in parallel with all other work. Only a tower without a gradient
  for some trainable parameter waits for them: for the other hosts, not for a GPU.
- If a gather shows that all towers had all gradients, further ones only check whether towers were in the same
  backwards, once for :data:`WINDOW` of them. A tower that then has no gradient for a parameter reads the tail, and
  waits for its GPU, until the next gather informs all towers.
- A gather is read when it is complete, at the latest when the third backward after its own starts. It only takes effect
  from that backward on, so all towers change at the same one.

On an H200, reading the flags before the optimizer's step took 2 ms of a step of 6 ms: the host waited for the other
towers' hosts, which had yet to queue their work.

[Note: other collectives in a backward] A collective waits on its GPU until all towers have started it. The collectives
of batch norms over all towers run inside backwards, on their own communicator. If towers use different parameters, a
bucket can be full on tower 0 before the backward of a batch norm, and on tower 1 only after it. If the host of tower 0
then waits for its GPU, as memory allocation may do, it waits for the bucket on tower 1, which waits for the batch norm
on tower 0. Therefore, with such layers, buckets start early only while gathers show that all towers use the same
parameters. After a change, it takes up to 11 backwards until a gather shows it. A host that waits for its GPU in one of
these may wait until ``timeout_seconds`` are over, and the job then ends with an error.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from towers.collectives.communicator import Communicator, from_bytes
from towers.gradients.pairing import same_backward

Read = Callable[[], Sequence[float]]
"""Returns for each flag the number of towers that have set it (or a multiple of that). It may make the host wait."""


class Summary(NamedTuple):
    """The message in a backward's last bucket, in addition to the bucket's own flags.

    Attributes:
        touched: the units that this tower has gradients for.
        continues: whether this tower continues without reading what the others have touched.
        backward: the backward's identification (:mod:`towers.gradients.pairing`). Empty if the hosts compare it.
    """

    touched: list[bool]
    continues: bool
    backward: list[bool]

    def flags(self) -> list[bool]:
        """Returns the numbers that follow the bucket's own flags in its tail."""
        return [*self.touched, self.continues, *self.backward]


class Passed(NamedTuple):
    """A backward of this tower, for the comparison by the hosts.

    Attributes:
        backward: its identification.
        text: the same in words, for messages.
        complete: whether this tower had a gradient for every trainable parameter, and for no other.
    """

    backward: list[bool]
    text: str
    complete: bool


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
        self._continues_at = slots + units

    def used(self) -> Sequence[float]:
        """Returns for each slot of the bucket a number that is zero if no tower has used it (see the class)."""
        return self._read()[: self._touched_at]

    def summary(self) -> tuple[list[bool], bool, Sequence[float]]:
        """Returns the last bucket's message: what any tower has touched, whether any continues, and the backward."""
        counts, at = self._read(), self._continues_at
        return [n > 0 for n in counts[self._touched_at : at]], counts[at] > 0, counts[at + 1 :]


_TEXT_BYTES = 200

_AHEAD = 2
"""The number of backwards by which a host may be ahead of the slowest one (see [Note: usage flags between GPUs])."""

WINDOW = 8
"""The number of backwards between two gathers, as long as all towers have all gradients."""


class Comparison:
    """Compares flags and backwards of towers on accelerators, over their hosts.

    See [Note: usage flags between GPUs].

    Args:
        channel: the towers'.

    Attributes:
        other_collectives: whether backwards contain collectives on another communicator.
    """

    def __init__(self, channel: Communicator) -> None:
        self.other_collectives = False
        self._channel = channel
        self._number = 0  # of the backward
        self._passed: list[Passed] = []  # since the last gather
        self._unread: deque[tuple[int, Gather]] = deque()  # and the numbers of their backwards
        self._read: deque[tuple[int, bool, bool]] = deque()  # gathers that decide later: all complete, all equal
        self._all_complete = False
        self._all_equal = False  # whether the newest gather in effect shows that towers use the same parameters

    def difference(self) -> list[bytes] | None:
        """Returns None if towers were in the same backwards, as far as known.

        Otherwise, it returns every tower's first different one, in words.
        """
        while self._unread and (self._unread[0][0] <= self._number - _AHEAD or self._unread[0][1].is_done()):
            number, gather = self._unread.popleft()
            if (texts := gather.difference()) is not None:
                return texts
            if (complete := gather.was_complete()) is not None:
                self._read.append((number, complete, complete or gather.was_equal()))
        return None

    def begin(self) -> None:
        """Notes that a backward begins, after :meth:`difference`."""
        while self._read and self._read[0][0] <= self._number - _AHEAD:  # all towers have read it by now
            _, self._all_complete, self._all_equal = self._read.popleft()
        self._number += 1

    def lets_buckets_start_early(self) -> bool:
        """Returns whether buckets may start before the backward is over ([Note: other collectives in a backward]).

        The result changes at the same backward on all towers.
        """
        return self._all_equal or not self.other_collectives

    def note(self, passed: Passed) -> None:
        """Notes a backward whose buckets are packed."""
        self._passed.append(passed)

    def gather(self, flags: Sequence[Sequence[bool]]) -> list[Read] | None:
        """Starts a gather if one is due, and returns how to read each bucket's flags. None: they must be in the tails.

        Args:
            flags: each bucket's, of one length on all towers.
        """
        if self._all_complete and len(self._passed) < WINDOW:
            return None
        gather = Gather(self._channel, [] if self._all_complete else flags, self._passed)
        self._passed = []
        self._unread.append((self._number, gather))
        return None if self._all_complete else [functools.partial(gather.read, number) for number in range(len(flags))]


class Gather:
    """Flags of packed buckets, and past backwards, on their way through the hosts.

    It must be kept until it is done, because it holds the tensors of the collective.

    Args:
        channel: the towers'.
        flags: each bucket's, of one length on all towers.
        passed: this tower's backwards since the last gather, as many on all towers.
    """

    def __init__(self, channel: Communicator, flags: Sequence[Sequence[bool]], passed: Sequence[Passed]) -> None:
        rows = [bytes(row) for row in flags]
        for backward, text, complete in passed:
            rows += [bytes(backward), text.encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0"), bytes([complete])]
        self._sizes = [len(row) for row in rows]
        self._buckets = len(flags)
        self._pending, self._gathered = channel.start_all_gather(from_bytes(b"".join(rows)))

    def is_done(self) -> bool:
        """Returns whether reading does not wait for other hosts."""
        return self._pending.is_done()

    def read(self, bucket: int) -> Sequence[float]:
        """Waits for the other hosts, and returns the counts of a bucket's flags."""
        counts: list[float] = self._rows()[bucket].sum(0).tolist()
        return counts

    def difference(self) -> list[bytes] | None:
        """Waits for the other hosts, and returns the result of :meth:`Comparison.difference` for these backwards."""
        rows = self._rows()[self._buckets :]
        for backward, texts in zip(rows[::3], rows[1::3], strict=True):
            if not same_backward(backward.sum(0).tolist()):
                return [text.numpy().tobytes().rstrip(b"\0") for text in texts]
        return None

    def was_complete(self) -> bool | None:
        """Waits for the other hosts, and returns whether all towers' backwards were complete, or None without any."""
        complete = self._rows()[self._buckets + 2 :: 3]
        return all(bool(row.all()) for row in complete) if complete else None

    def was_equal(self) -> bool:
        """Waits for the other hosts, and returns whether all towers' flags were gathered and equal."""
        rows = self._rows()[: self._buckets]
        return bool(rows) and all(bool((row == row[0]).all()) for row in rows)

    def _rows(self) -> Sequence[Tensor]:
        """Returns the rows of all towers, each of shape (towers, bytes)."""
        self._pending.wait()
        rows: Sequence[Tensor] = self._gathered.split(self._sizes, dim=1)
        return rows
