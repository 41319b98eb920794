"""What can go wrong with checkpoints, as types a caller can catch."""

from __future__ import annotations

from collections.abc import Iterable

from towers.health.failure import EXIT_PREEMPTED
from towers.system.text import printable


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read, or loaded into what is there; the text names it.

    The text may quote a checkpoint that a stranger has written: it is one line, and nothing in it moves a cursor.
    """

    def __init__(self, text: str) -> None:
        super().__init__(printable(" ".join(text.replace("\t", " ").splitlines())))


class Preempted(SystemExit):
    """The run was asked to stop, has finished its step and is saved; ends the program with exit code 75.

    75 is EX_TEMPFAIL of sysexits.h: try again later.
    """

    def __init__(self, step: int) -> None:
        super().__init__(EXIT_PREEMPTED)
        self.step = step

    def __reduce__(self) -> tuple[type[Preempted], tuple[int]]:
        return Preempted, (self.step,)


def some_of(names: Iterable[str]) -> str:
    """Names that a stranger may have written, as a person reads them."""
    found = [printable(name, 100) for name in names]
    return ", ".join(found[:20]) + (f" and {len(found) - 20} more" if len(found) > 20 else "")
