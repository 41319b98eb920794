"""With how many towers a job may go on after a failure: the rules of ``restarts`` and ``min_towers``."""

from __future__ import annotations

from collections.abc import Sequence

from towers.launching.job import Job


def check_restarts(restarts: int, min_towers: int | None, virtual_towers: int | None) -> None:
    """Check that a strategy's options, or those of ``mirrored run``, fit each other.

    Raises:
        ValueError: they do not.
    """
    if not isinstance(restarts, int) or isinstance(restarts, bool) or restarts < 0:
        raise ValueError(f"restarts is {restarts!r}, but must be a whole number from 0")
    if min_towers is None:
        return
    if not isinstance(min_towers, int) or isinstance(min_towers, bool) or min_towers < 1:
        raise ValueError(f"min_towers is {min_towers!r}, but must be a positive whole number")
    if not restarts:
        raise ValueError(f"min_towers={min_towers} is for jobs that start again: say restarts=, too")
    if virtual_towers is not None and virtual_towers % min_towers:
        raise ValueError(
            f"min_towers is {min_towers}, but virtual_towers={virtual_towers} is cut into equal parts: say a number "
            "that divides it"
        )


def choose_members(job: Job, present: Sequence[int]) -> list[int]:
    """As many of the workers that have come as can take part; empty: they are too few for ``min_towers``."""
    for count in range(len(present), 0, -1):
        towers = count * job.towers
        if towers >= (job.min_towers or 1) and (job.virtual_towers or towers) % towers == 0:
            return list(present[:count])
    return []
