"""Errors of checkpoints, and a function that raises the error of one tower on all towers."""

from __future__ import annotations

from collections.abc import Iterable

from towers.collectives.agreement import announce
from towers.collectives.communicator import Communicator
from towers.health.failure import EXIT_PREEMPTED
from towers.system.messages import printable

_LONGEST = 4000  # characters of a problem, which may quote an untrusted checkpoint


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read, or loaded into the objects of this run. The message names the checkpoint.

    The message may quote an untrusted checkpoint, so it is one line without control characters.
    """

    def __init__(self, text: str) -> None:
        super().__init__(printable(" ".join(text.replace("\t", " ").splitlines())))


class Preempted(SystemExit):
    """A signal requested a stop, and the run has finished its step and saved. Ends the program with exit code 75.

    75 is EX_TEMPFAIL of sysexits.h: try again later.
    """

    def __init__(self, step: int) -> None:
        super().__init__(EXIT_PREEMPTED)
        self.step = step


class TrainingStopped(SystemExit):
    """An early stop of the training on all towers, after the step is saved. ``CheckpointManager.resume`` catches it.

    Outside ``resume``, it ends the program with exit code 0.
    """


def listed(names: Iterable[str]) -> str:
    """Returns up to 20 names from an untrusted checkpoint, in printable form, as an enumeration."""
    shown = [printable(name, 100) for name in names]
    more = f" and {len(shown) - 20} more" if len(shown) > 20 else ""
    return ", ".join(shown[:20]) + more


def raise_first(comm: Communicator, call: str, problem: str, prefix: str = "") -> None:
    """Raises the problem of the first tower that has one, on all towers.

    With several towers, the message names the tower. This is a collective: towers without a problem must call it, too.

    Args:
        call: the operation in progress, as for :func:`announce`.
        problem: this tower's problem; empty if there is none.
        prefix: the start of the message.

    Raises:
        CheckpointError: a tower has a problem.
    """
    for tower, other in enumerate(announce(comm, call, problem[:_LONGEST])):
        if other:
            raise CheckpointError(prefix + (f"tower {tower}: " if comm.size > 1 else "") + other)
