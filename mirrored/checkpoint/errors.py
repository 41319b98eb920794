"""What can go wrong with checkpoints, as types a caller can catch."""

from __future__ import annotations

from towers.failure import EXIT_PREEMPTED


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written, read, or loaded into what is there; the text names it."""


class Preempted(SystemExit):
    """The run was asked to stop, has finished its step and is saved; ends the program with exit code 75.

    75 is EX_TEMPFAIL of sysexits.h: try again later.
    """

    def __init__(self, step: int) -> None:
        super().__init__(EXIT_PREEMPTED)
        self.step = step

    def __reduce__(self) -> tuple[type[Preempted], tuple[int]]:
        return Preempted, (self.step,)
