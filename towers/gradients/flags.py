"""The flags that are sent with gradients: which backward they belong to, and which parameters had gradients in it.

A backward is identified by three numbers: its run (``strategy.run`` calls are counted), its position among the averaged
backwards of that run, and the present global batch of the script, if there is one. They are sent with the gradients, in
the tail of the last bucket of a backward. There, each bit is followed by its opposite. After a sum over towers, one of
the two is zero if all towers agree. Zero is exact in every dtype, however the sum was rounded.

[Note: backwards are paired by run, number and batch] Collectives pair in the order in which they start. So if a tower
skipped a backward, its next one would be averaged with the skipped one, and so on for every later one. If one tower
made an additional ``run``, shares of different batches would be averaged. To detect this, no collective was added. With
virtual towers and in ``strategy.grad``, the announcement contains the three numbers. The batch is the present one of
the loop, not one of the arguments of ``run``, which may be a tower's own choice of earlier examples. A reentrant
checkpoint runs a backward within the backward. The outermost one counts (:mod:`towers.system.autograd_hooks`), so the
number of checkpoints may differ between towers.

[Note: usage flags between GPUs] On CPUs, the flags are part of the buckets' tails, and are available when the buckets
are reduced. Reading a tail from a GPU would make the host wait for the whole backward. But a tower that has a gradient
for every trainable parameter needs no flags of others before the optimizer's step. Between GPUs, therefore:

- Hosts gather the flags of each backward over Gloo, in parallel with all other work. Only a tower without a gradient
  for some trainable parameter waits for them: for the other hosts, not for a GPU.
- If a gather shows that all towers had all gradients, further ones only check whether towers were in the same
  backwards, once for :data:`WINDOW` of them. A tower that then has no gradient for a parameter reads the tail, and
  waits for its GPU, until the next gather informs all towers.
- A gather takes effect from the third backward after its own, on all towers. It is read when it is complete, or then at
  the latest. Many towers add up their flags, and read the sums only then: a difference needs another collective.

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
import operator
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from towers.collectives.communicator import Communicator, from_bytes
from towers.errors import DECIDE_TOGETHER, DisagreementError
from towers.health.status import Place, with_batch
from towers.system.messages import name_towers

Read = Callable[[], Sequence[float]]
"""Returns for each flag the number of towers that have set it (or a multiple of that). It may make the host wait."""

_TEXT_BYTES = 200
_AHEAD = 2
"""The number of backwards by which a host may be ahead of the slowest one (see [Note: usage flags between GPUs])."""

WINDOW = 8
"""The number of backwards between two gathers, as long as all towers have all gradients."""


_WIDTH = 16  # bits of the number of the run, of the backward in it, and of the batch; first differences are small
_MULTIPLIER = 40503  # keeps the batches of different loops apart (Knuth's, odd, near 2**16 times the golden section)

_OF_BYTE = [[bit for i in range(8) for bit in (bool(byte >> i & 1), not byte >> i & 1)] for byte in range(256)]

ADVICE = (
    "Some tower has left out a backward(), a run or an optimizer's step, or has made one more than the others; every "
    f"tower must make the same ones in every step, with every batch. {DECIDE_TOGETHER}"
)

BITS = 6 * _WIDTH
"""The number of bits that identify a backward, including opposites."""


class Backward(NamedTuple):
    """One averaged backward of a tower.

    Attributes:
        place: where it started.
        number: its number among those of its run.
        calls: the tower's calls since the last one (:class:`towers.collectives.agreement.RepeatedCalls`).
        digest: a number that depends on all backwards so far and the calls before them, without batches.
    """

    place: Place
    number: int
    calls: Sequence[str]
    digest: int

    def next(self, place: Place, calls: Sequence[str] = ()) -> Backward:
        """Returns the tower's next backward."""
        number = self.number + 1 if place.run == self.place.run else 1
        identification = b"%d %d %s" % (place.run, number, "\n".join(calls).encode())
        return Backward(place, number, calls, zlib.crc32(identification, self.digest))

    def bits(self) -> list[bool]:
        """Returns its identification as :data:`BITS` bits. Without a batch, its bits and their opposites are 0."""
        numbers = [self.place.run, self.number]
        if (batch := self.place.batch) is not None:
            numbers.append(batch.loop * _MULTIPLIER + batch.step)
        bits = [bit for number in numbers for half in (0, 8) for bit in _OF_BYTE[number >> half & 255]]
        return bits + [False] * (BITS - len(bits))

    def bits_of_digest(self) -> list[bool]:
        """Returns bits of the digest, each followed by its opposite."""
        return [bit for half in (0, 8) for bit in _OF_BYTE[self.digest >> half & 255]]

    def __str__(self) -> str:
        number, step, batch = self.place
        run = f", in call {number} of strategy.run," if number != step else ""
        text = with_batch(f"backward() number {self.number} of step {step}{run}", batch)
        return f"{text}, before which the tower {', '.join(self.calls)}" if self.calls else text


BEFORE_ALL = Backward(Place(0, 0, None), 0, (), 0)
"""The state of a tower before its first backward."""


def same_backward(counts: Sequence[float]) -> bool:
    """Returns whether all towers are in the same backward.

    Args:
        counts: for each of the :data:`BITS` bits, the number of towers that have set it, or the mean (that number over
            N).
    """
    return not any(map(operator.mul, counts[::2], counts[1::2]))  # a bit or its opposite is zero


def different_backwards(numbers: Sequence[int], texts: Iterable[bytes]) -> DisagreementError:
    """Returns the error of towers in different backwards.

    Args:
        numbers: the towers'.
        texts: each tower's backward in words.
    """
    towers: dict[str, list[int]] = {}
    for number, text in zip(numbers, texts, strict=True):
        towers.setdefault(text.decode(errors="replace"), []).append(number)
    places = ", ".join(f"{place} on {name_towers(where)}" for place, where in towers.items())
    return DisagreementError(f"gradients of different backwards would be averaged: {places}. {ADVICE}")


# -- which parameters had gradients -----------------------------------------------------------------------


class Summary(NamedTuple):
    """The message in a backward's last bucket, in addition to the bucket's own flags.

    Attributes:
        touched: the units that this tower has gradients for.
        continues: whether this tower continues without reading what the others have touched.
        backward: the backward's identification. Empty if the hosts compare it.
    """

    touched: list[bool]
    continues: bool
    backward: list[bool]

    def flags(self) -> list[bool]:
        """Returns the numbers that follow the bucket's own flags in its tail."""
        return [*self.touched, self.continues, *self.backward]

    @staticmethod
    def counted(counts: Sequence[float], units: int) -> tuple[list[bool], bool, Sequence[float]]:
        """Returns which units any tower has touched, whether any continues, and the counts of the backward's bits.

        Args:
            counts: of the towers that have set each of these flags.
            units: the number of the layout's units.
        """
        return [n > 0 for n in counts[:units]], counts[units] > 0, counts[units + 1 :]


class Passed(NamedTuple):
    """A backward of this tower, for the comparison by the hosts.

    Attributes:
        backward: its place, number and calls.
        complete: whether this tower had a gradient for every trainable parameter, and for no other.
    """

    backward: Backward
    complete: bool


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

    It must be kept until it is done, because it holds the tensors of the collective. A few towers gather everything,
    with the backwards in words. More towers add up the flags, and gather the words only if backwards differ; see
    [Note: short messages] in :mod:`towers.collectives.communicator`.

    Args:
        channel: the towers'.
        flags: each bucket's, of one length on all towers.
        passed: this tower's backwards since the last gather, as many on all towers.
    """

    def __init__(self, channel: Communicator, flags: Sequence[Sequence[bool]], passed: Sequence[Passed]) -> None:
        self._channel = channel
        rows = [bytes(row) for row in flags]
        for backward, complete in passed:
            rows += [bytes(backward.bits() + backward.bits_of_digest()), bytes([complete])]
        self._sizes = [len(row) for row in rows]
        self._buckets = len(flags)
        self._texts = [str(backward).encode()[:_TEXT_BYTES] for backward, _ in passed]
        self._gathers = channel.are_few
        if self._gathers:
            rows += [text.ljust(_TEXT_BYTES, b"\0") for text in self._texts]
            self._pending, self._sent = channel.start_all_gather(from_bytes(b"".join(rows)))
        else:
            self._sent = from_bytes(b"".join(rows)).to(torch.int32)
            self._pending = channel.start_all_sum(self._sent)

    def is_done(self) -> bool:
        """Returns whether :meth:`difference` neither waits for other hosts nor runs a collective."""
        return self._gathers and self._pending.is_done()

    def read(self, bucket: int) -> Sequence[float]:
        """Waits for the other hosts, and returns the counts of a bucket's flags."""
        counts: list[float] = self._counts[bucket].tolist()
        return counts

    def difference(self) -> list[bytes] | None:
        """Waits for the other hosts, and returns the result of :meth:`Comparison.difference` for these backwards."""
        for number, counts in enumerate(self._counts[self._buckets :: 2]):
            if not same_backward(counts.tolist()):
                if not self._gathers:
                    return self._channel.all_gather_bytes(self._texts[number])
                words = self._sent[:, sum(self._sizes) + number * _TEXT_BYTES :][:, :_TEXT_BYTES]
                return [row.numpy().tobytes().rstrip(b"\0") for row in words]
        return None

    def was_complete(self) -> bool | None:
        """Waits for the other hosts, and returns whether all towers' backwards were complete, or None without any."""
        complete = self._counts[self._buckets + 1 :: 2]
        return all(int(count) == self._channel.size for count in complete) if complete else None

    def was_equal(self) -> bool:
        """Waits for the other hosts, and returns whether all towers' flags were sent and equal."""
        counts = self._counts[: self._buckets]
        return bool(counts) and all(set(row.tolist()) <= {0, self._channel.size} for row in counts)

    @functools.cached_property
    def _counts(self) -> Sequence[Tensor]:
        """For each bucket its flags' numbers of towers; then for each backward those of its bits and completeness."""
        self._pending.wait()
        counts = self._sent[:, : sum(self._sizes)].sum(0) if self._gathers else self._sent
        split: Sequence[Tensor] = counts.split(self._sizes)
        return split
