"""When the towers of a job are started again after a failure.

[Note: attempts] The agent runs one attempt after the other, each of new processes, until one ends well or is preempted,
a signal ends the agent itself, or :class:`Restarts` gives up. The script restores the newest checkpoint that all towers
have, as when a person starts it again. The agent of worker 0 decides, and says so in the store that it serves for all
attempts: the others wait there for its next one, or for what it has given up with.

An agent that a scheduler has started in place of a killed one finds that its worker takes part in an attempt already.
It asks for the next one, which ends the present attempt on all workers. Where it was worker 0's, a new store listens at
its address, and the others find the first attempt of it there.
"""

from __future__ import annotations

from towers.health.failure import EXIT_PREEMPTED
from towers.launching.attempt import Attempt
from towers.launching.job import Job


class Restarts:
    """Counts the attempts at a job, and decides whether there is another one.

    Args:
        job: says how many there may be.

    Attributes:
        number: of the present attempt on this worker, from 0.
    """

    def __init__(self, job: Job) -> None:
        self.number = 0
        self._job = job
        self._failures: list[str] = []  # of the attempts, the last line of each
        self._against: str | None = None

    def goes_on(self, attempt: Attempt, code: int, text: str) -> bool:
        """Whether there is another attempt after this one, or this worker has to ask the chief.

        Args:
            code, text: how it has ended.
        """
        if code == EXIT_PREEMPTED and attempt.forwarded is None and attempt.broadcast.is_joined():
            return True
        if self._job.restarts == 0 or code in (0, EXIT_PREEMPTED) or attempt.forwarded is not None:
            return False
        self._failures.append(text.splitlines()[-1].removeprefix("towers: "))
        self._against = self._reason_against(attempt)
        return self._against is None

    def _reason_against(self, attempt: Attempt) -> str | None:
        if self._job.worker > 0:  # worker 0 decides
            return None
        if len(self._failures) > self._job.restarts:
            return f"it was, {self._job.restarts} times"
        if self._failures[-1:] == self._failures[-2:-1]:
            return "it was, and has failed in the same way at the same step"
        if not self._job.from_the_start and (steps := _steps_to_lose(attempt)):
            return (
                f"the script restores no checkpoint, so its {steps} steps would be lost. Let a CheckpointManager save "
                "and resume them; or say --from-the-start to mirrored run"
            )
        return None

    def last_words(self) -> str:
        """Why the job is not started again after a failure, and what the first one was; empty where none is awaited."""
        if self._against is None:
            return ""
        first = f"; first of all, {self._failures[0]}" if self._failures[0] != self._failures[-1] else ""
        return f"not started again: {self._against}{first}"

    def begin_next(self, code: int) -> str:
        """Count the next attempt; returns what is said of it.

        Args:
            code: how the one before has ended.
        """
        self.number += 1
        if code == EXIT_PREEMPTED:
            return "towers: all start again, with a worker that has come"
        if self._job.worker > 0:
            return "towers: worker 0 decides whether all start again"
        return f"towers: all start again ({len(self._failures)} of {self._job.restarts} restarts)"


def _steps_to_lose(attempt: Attempt) -> int:
    """How many steps the script would make once more, all of which a person would want to be asked about."""
    records = attempt.records()
    return 0 if any(record.restores for record in records) else min((each.read().step for each in records), default=0)
