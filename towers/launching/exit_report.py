"""The agent's report of how a job ended: the exit code, and the message that is printed last."""

from __future__ import annotations

import math
import socket

from towers.health.failure import EXIT_PREEMPTED, signal_name
from towers.launching.attempt import Attempt
from towers.launching.job import Job
from towers.system.log import get_logger

_OTHER_WORKERS = 300.0  # seconds to wait for the other workers to end, after this one
_OTHERS_TOGETHER = 15.0  # the same if this worker's towers were preempted

log = get_logger("towers")


def make_exit_report(job: Job, attempt: Attempt) -> tuple[int, str]:
    """Returns how the job ended. If this worker's towers ended well, it first waits for those of the other workers.

    Returns:
        The exit code, negative for the signal that ended the job, and the message that is printed last.
    """
    if attempt.died_of_forwarded is not None:
        return -attempt.died_of_forwarded, ""
    if not attempt.failed and len(attempt.endings) == job.towers:
        if (sentence := _first_good_end(job, attempt)) is not None:
            attempt.broadcast.await_ends(sentence, _OTHERS_TOGETHER if attempt.preempted else _OTHER_WORKERS)
        if attempt.broadcast.received is None:
            return (EXIT_PREEMPTED, _preempted(attempt)) if attempt.preempted else (0, "")
    return _failure(job, attempt)


def _preempted(attempt: Attempt) -> str:
    tower = min(tower for tower, code in attempt.endings.items() if code == EXIT_PREEMPTED)
    by = f" by {attempt.forwarded.name}" if attempt.forwarded is not None else ""
    return f"mirrored: preempted{by}: the towers ended {_status(attempt, tower)}, with exit code {EXIT_PREEMPTED}"


def _failure(job: Job, attempt: Attempt) -> tuple[int, str]:
    codes = {tower: code for tower, code in attempt.endings.items() if code}
    if not codes:
        return 1, f"mirrored: {attempt.broadcast.received}"
    reports = {tower: attempt.report_of(tower) for tower in codes}
    for tower, report in reports.items():
        log.debug("tower %d ended with %d; its report: %s", tower, codes[tower], report.short if report else "none")
    first = min(codes, key=lambda tower: (own.consequence, own.time) if (own := reports[tower]) else (False, math.inf))
    report, code = reports[first], codes[first]
    name, status = _name(job, first), _status(attempt, first)
    lines = []
    if report is not None:
        lines.append(f"mirrored: tower {first} failed:\n{report.trace.rstrip()}")
        sentence = f"{name} failed {status}: {report.short}"
    elif code < 0:
        sentence = f"{name} was ended by {signal_name(-code)} {status}"
    else:
        alone = ", and others did not, so nothing was saved together" if code == EXIT_PREEMPTED else ""
        sentence = f"{name} ended with exit code {code} {status}{alone}"
    lines.append(f"mirrored: {sentence}")
    is_consequence = report is not None and report.consequence
    # A tower that only reports the loss of another is not the root cause, but a tower that ended well may be.
    cause = attempt.broadcast.first_failure(_first_good_end(job, attempt) if is_consequence else sentence)
    if cause not in (None, sentence):
        lines.append(f"mirrored: root cause: {cause}")
    return 1 if code == EXIT_PREEMPTED else code if code > 0 else 128 - code, "\n".join(lines)


def _first_good_end(job: Job, attempt: Attempt) -> str | None:
    """Returns a sentence on the first tower that ended without a failure, and its last status; None if all failed."""
    for tower, code in attempt.endings.items():
        if code in (0, EXIT_PREEMPTED):
            status = attempt.status_of(tower)
            call = ""
            if code == 0 and status is not None and status.is_between_runs:
                call = " and made a call that it did not make: look for one under `if strategy.is_chief:`"
            end = f"ended with exit code {code} {_status(attempt, tower)}"
            return f"{_name(job, tower)} {end}, while others continued{call}"
    return None


def _name(job: Job, tower: int) -> str:
    """Returns the tower's name, with its worker if there are several."""
    host = f" on {socket.gethostname()} (worker {job.worker})" if job.workers > 1 else ""
    return f"tower {tower}{host}"


def _status(attempt: Attempt, tower: int) -> str:
    """Returns a tower's last status, as part of a sentence."""
    status = attempt.status_of(tower)
    return "before its strategy was made" if status is None else str(status)
