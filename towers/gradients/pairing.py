"""Which backward a gradient belongs to, so that gradients of different backwards are never averaged together.

A backward is known by the run that it is in (``strategy.run`` calls are counted), by its number among the averaged
backwards of that run, and by the global batch that the script is at, where there is one. They travel with the
gradients, in the tail of the last bucket of a backward. There each bit is followed by its opposite: after a sum
over towers one of the two is zero where all towers agree, and zero is exact in every dtype, however the sum was
rounded.

[Note: backwards are paired by run, number and batch] Collectives pair by the order in which they begin. So a tower that
skips a backward would have its next one averaged with the one that it skipped, and every later one as well; and after a
``run`` that one tower has made once more, shares of different batches would be averaged. No collective was added to
find that out: with virtual towers and in ``strategy.grad`` it is in the announcement. The batch is the one in hand, not
those among the arguments of ``run``, which may be a tower's own choice of earlier examples. A reentrant checkpoint runs
a backward within the backward; the outermost one counts (:mod:`towers.system.autograd_hooks`), so the number of
checkpoints may differ between towers.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from towers.collectives.communicator import Communicator
from towers.errors import DECIDE_TOGETHER, DisagreementError
from towers.health.status import Health, with_batch
from towers.system.text import name_towers

_WIDTH = 16  # bits of the run's number, of the backward's in its run, and of the batch's; first differences are small
_MULTIPLIER = 40503  # keeps the batches of different loops apart (Knuth's, odd, near 2**16 times the golden section)

_OF_BYTE = [[bit for i in range(8) for bit in (bool(byte >> i & 1), not byte >> i & 1)] for byte in range(256)]

BITS = 6 * _WIDTH
"""How many bits tell one backward from the others, opposites included."""


class BackwardCounter:
    """Counts the backwards of one tower.

    Args:
        health: says which run this tower is in.
    """

    def __init__(self, health: Health) -> None:
        self._health = health
        self._run = health.run
        self._step = health.step
        self._number = 0
        self._batch = health.batches.value

    def begin(self) -> None:
        """Count a backward, which begins."""
        if self._run != self._health.run:
            self._run, self._number = self._health.run, 0
        self._step, self._batch = self._health.step, self._health.batches.value
        self._number += 1

    def bits(self) -> list[bool]:
        """The present backward, as :data:`BITS` bits; where there is no batch, its bits and their opposites are 0."""
        numbers = [self._run, self._number]
        if self._batch is not None:
            numbers.append(self._batch.loop * _MULTIPLIER + self._batch.step)
        bits = [bit for number in numbers for half in (0, 8) for bit in _OF_BYTE[number >> half & 255]]
        return bits + [False] * (BITS - len(bits))

    def __str__(self) -> str:
        run = f" (run {self._run})" if self._run != self._step else ""
        return with_batch(f"backward() {self._number} of step {self._step}{run}", self._batch)


def same_backward(counts: Sequence[float]) -> bool:
    """Whether all towers are in the same backward.

    Args:
        counts: for each of the :data:`BITS` bits, how many towers have set it, or the mean (that number over N).
    """
    return not any(map(operator.mul, counts[::2], counts[1::2]))  # of a bit and its opposite one is zero


def difference(channel: Communicator, backward: BackwardCounter) -> DisagreementError:
    """The error of towers that are in different backwards, with one text on all of them; all towers call it."""
    towers: dict[str, list[int]] = {}
    for tower, text in enumerate(channel.all_gather_bytes(str(backward).encode())):
        towers.setdefault(text.decode(), []).append(channel.towers[tower])
    places = ", ".join(f"{place} on {name_towers(where)}" for place, where in towers.items())
    return DisagreementError(
        f"gradients of different backwards would be averaged: {places}. Some tower has left out a backward() or a run, "
        "or has made one more than the others; every tower must make the same ones in every step, with every batch. "
        f"{DECIDE_TOGETHER}"
    )
