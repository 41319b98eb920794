"""Identifies the backward of a gradient, so that gradients of different backwards are never averaged together.

A backward is identified by three numbers: its run (``strategy.run`` calls are counted), its position among the averaged
backwards of that run, and the present global batch of the script, if there is one. They are sent with the gradients, in
the tail of the last bucket of a backward. There, each bit is followed by its opposite. After a sum over towers, one of
the two is zero if all towers agree. Zero is exact in every dtype, however the sum was rounded.

[Note: backwards are paired by run, number and batch] Collectives pair in the order in which they start. So if a tower
skipped a backward, its next one would be averaged with the skipped one, and so on for every later one. If one tower
made an additional ``run``, shares of different batches would be averaged. No collective was added to detect that; with
virtual towers and in ``strategy.grad``, the announcement contains it. The batch is the present one of the loop, not one
of the arguments of ``run``, which may be a tower's own choice of earlier examples. A reentrant checkpoint runs a
backward within the backward. The outermost one counts (:mod:`towers.system.autograd_hooks`), so the number of
checkpoints may differ between towers.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Iterable, Sequence

from towers.errors import DECIDE_TOGETHER, DisagreementError
from towers.health.status import Health, with_batch
from towers.system.text import name_towers

_WIDTH = 16  # bits of the number of the run, of the backward in it, and of the batch; first differences are small
_MULTIPLIER = 40503  # keeps the batches of different loops apart (Knuth's, odd, near 2**16 times the golden section)

_OF_BYTE = [[bit for i in range(8) for bit in (bool(byte >> i & 1), not byte >> i & 1)] for byte in range(256)]

ADVICE = (
    "Some tower has left out a backward(), a run or an optimizer's step, or has made one more than the others; every "
    f"tower must make the same ones in every step, with every batch. {DECIDE_TOGETHER}"
)

BITS = 6 * _WIDTH
"""The number of bits that identify a backward, including opposites."""


class BackwardCounter:
    """Counts the backwards of one tower.

    Args:
        health: contains this tower's present run.

    Attributes:
        digest: a number that depends on all backwards so far and the calls before them, without batches.
    """

    def __init__(self, health: Health) -> None:
        self._health = health
        self._run = health.run
        self._step = health.step
        self._number = 0
        self._batch = health.batches.value
        self._calls: Sequence[str] = ()
        self.digest = 0

    def begin(self, calls: Sequence[str] = ()) -> None:
        """Counts a backward that starts.

        Args:
            calls: this tower's calls since the last one (:class:`towers.collectives.agreement.RepeatedCalls`).
        """
        self._calls = calls
        if self._run != self._health.run:
            self._run, self._number = self._health.run, 0
        self._step, self._batch = self._health.step, self._health.batches.value
        self._number += 1
        self.digest = zlib.crc32(b"%d %d %s" % (self._run, self._number, "\n".join(calls).encode()), self.digest)

    def bits(self) -> list[bool]:
        """Returns the present backward as :data:`BITS` bits. Without a batch, its bits and their opposites are 0."""
        numbers = [self._run, self._number]
        if self._batch is not None:
            numbers.append(self._batch.loop * _MULTIPLIER + self._batch.step)
        bits = [bit for number in numbers for half in (0, 8) for bit in _OF_BYTE[number >> half & 255]]
        return bits + [False] * (BITS - len(bits))

    def bits_of_digest(self) -> list[bool]:
        """Returns bits of the digest, each followed by its opposite."""
        return [bit for half in (0, 8) for bit in _OF_BYTE[self.digest >> half & 255]]

    def __str__(self) -> str:
        run = f", in call {self._run} of strategy.run," if self._run != self._step else ""
        text = with_batch(f"backward() number {self._number} of step {self._step}{run}", self._batch)
        return f"{text}, before which the tower {', '.join(self._calls)}" if self._calls else text


def same_backward(counts: Sequence[float]) -> bool:
    """Returns whether all towers are in the same backward.

    Args:
        counts: for each of the :data:`BITS` bits, the number of towers that have set it, or the mean (that number over
            N).
    """
    return not any(map(operator.mul, counts[::2], counts[1::2]))  # a bit or its opposite is zero


def difference(numbers: Sequence[int], texts: Iterable[bytes]) -> DisagreementError:
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
