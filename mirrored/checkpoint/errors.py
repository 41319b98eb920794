"""Errors of checkpoints, and how an error of one tower becomes the same error on all."""

from __future__ import annotations

from collections.abc import Iterable

from towers.collectives.agreement import announce
from towers.collectives.communicator import Communicator
from towers.health.failure import EXIT_PREEMPTED
from towers.system.text import printable

_LONGEST = 4000  # characters of a problem, which may quote an untrusted checkpoint


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read, or loaded into the objects of this run; the text names it.

    The text may quote an untrusted checkpoint, so it is one line without control characters.
    """

    def __init__(self, text: str) -> None:
        super().__init__(printable(" ".join(text.replace("\t", " ").splitlines())))


class Preempted(SystemExit):
    """A signal asked the run to stop; it has finished its step and saved. Ends the program with exit code 75.

    75 is EX_TEMPFAIL of sysexits.h: try again later.
    """

    def __init__(self, step: int) -> None:
        super().__init__(EXIT_PREEMPTED)
        self.step = step


class TrainingStopped(SystemExit):
    """The training ends early, on all towers, and is saved. ``CheckpointManager.resume`` takes it at its end.

    Elsewhere it ends the program, with exit code 0.
    """


def listed(names: Iterable[str]) -> str:
    """Up to 20 names from an untrusted checkpoint, printable, as an enumeration."""
    shown = [printable(name, 100) for name in names]
    more = f" and {len(shown) - 20} more" if len(shown) > 20 else ""
    return ", ".join(shown[:20]) + more


def raise_first(comm: Communicator, call: str, problem: str, prefix: str = "") -> None:
    """Raise the problem of the first tower that has one, on all towers; with several towers it names the tower.

    A collective: towers without a problem call it, too.

    Args:
        call: what is being done, as for :func:`announce`.
        problem: this tower's; empty when it has none.
        prefix: the beginning of the error's text.

    Raises:
        CheckpointError: a tower has a problem.
    """
    for tower, other in enumerate(announce(comm, call, problem[:_LONGEST])):
        if other:
            raise CheckpointError(prefix + (f"tower {tower}: " if comm.size > 1 else "") + other)
