"""CPU towers of one host: seconds of an all-reduce as a few unknowns times what is known, and fitting the unknowns.

Shared memory (``towers/collectives/shared_memory/regions.py``): two meetings, in each of which a tower posts and takes
a semaphore for each other tower, spinning where each has a core and sleeping where not (``barrier.py``); between them
it reads and writes its N-th part of all N windows, n bytes each way, at one speed where the windows fit into the last
cache and at another where they do not. Gloo: a ring, whose messages wait for other threads to wake, and are copied into
and out of the kernel.

With N towers on C < N cores, what needs a core takes turns and lasts N/C times as long. In shared memory that is all
there is. Of Gloo's time a part waits, which more towers do not make longer; how large it is, is fitted too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Machine:
    """Cores, and bytes of the last cache that they share."""

    cores: int
    cache: float

    def turns(self, towers: int) -> float:
        """By what work takes longer because towers share cores."""
        return max(1.0, towers / self.cores)


@dataclass(frozen=True)
class Point:
    """One measured all-reduce: towers, bytes, seconds."""

    towers: int
    nbytes: float
    seconds: float


Terms = Callable[[int, float, Machine], list[float]]
"""(towers, bytes, machine) → by what each of the unknowns is multiplied."""

SHARED_MEMORY = ("a semaphore, spinning", "a semaphore, sleeping", "a byte in the cache", "a byte in memory")
GLOO = ("a message's wait", "a message's work", "a byte's wait", "a byte's work")


def shared_memory(towers: int, nbytes: float, machine: Machine) -> list[float]:
    """Of our all-reduce in place, in the order of :data:`SHARED_MEMORY`."""
    turns = machine.turns(towers) if towers > 1 else 0.0
    fits, sleeps = towers * nbytes <= machine.cache, towers > machine.cores
    met = 2 * (towers - 1) * turns
    return [met * (not sleeps), met * sleeps, nbytes * turns * fits, nbytes * turns * (not fits)]


def gloo(towers: int, nbytes: float, machine: Machine) -> list[float]:
    """Of Gloo's ring, in the order of :data:`GLOO`."""
    rounds, turns = 2.0 * (towers - 1), machine.turns(towers)
    moved = rounds * nbytes / towers
    return [rounds, rounds * turns, moved, moved * turns]


def predict(unknowns: Sequence[float], terms: Terms, towers: int, nbytes: float, machine: Machine) -> float:
    """Seconds of an all-reduce."""
    return sum(a * b for a, b in zip(unknowns, terms(towers, nbytes, machine), strict=True))


def fit(points: Sequence[Point], terms: Terms, machine: Machine) -> list[float]:
    """The unknowns that fit best, by least squares of the relative errors; none is negative.

    A negative one is dropped: of all choices of unknowns that give none, the best is taken.
    """
    rows = np.array([[term / p.seconds for term in terms(p.towers, p.nbytes, machine)] for p in points])
    best: list[float] = [0.0] * rows.shape[1]
    least = float("inf")
    for count in range(1, rows.shape[1] + 1):
        for chosen in itertools.combinations(range(rows.shape[1]), count):
            found = np.linalg.lstsq(rows[:, chosen], np.ones(len(points)), rcond=None)[0]
            error = float(((rows[:, chosen] @ found - 1) ** 2).sum())
            if (found >= 0).all() and error < least - 1e-12:
                least = error
                best = [0.0] * rows.shape[1]
                for at, value in zip(chosen, found, strict=True):
                    best[at] = float(value)
    return best
