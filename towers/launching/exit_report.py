"""How a job ended, as its agent says it: the exit code, and the text that is printed last."""

from __future__ import annotations

import dataclasses
import signal

from torch.distributed.elastic.agent.server.api import RunResult

from towers.health.failure import EXIT_PREEMPTED, FailureReport, report_path, signal_name
from towers.launching.supervision import Supervisor, died_of
from towers.system.log import get_logger

log = get_logger("towers")


@dataclasses.dataclass(frozen=True)
class ExitReport:
    """How a job ended.

    Attributes:
        code: the exit code.
        text: what is printed last.
        died_of: the signal that ended it, if one did.
    """

    code: int = 0
    text: str = ""
    died_of: signal.Signals | None = None


def make_exit_report(supervisor: Supervisor, result: RunResult) -> ExitReport:
    """How the towers of this worker ended.

    Args:
        result: of torchrun's agent.
    """
    endings, forwarded = supervisor.endings, supervisor.forwarded
    if supervisor.failed_elsewhere is None:
        codes = set(endings.values())
        if forwarded is not None and codes & died_of(forwarded):
            return ExitReport(128 + forwarded, died_of=forwarded)
        if codes <= {0}:
            return ExitReport()
        if codes <= {0, EXIT_PREEMPTED} and len(endings) == supervisor.job.towers:
            return ExitReport(EXIT_PREEMPTED, _preempted(supervisor))
    return _failure(supervisor, result)


def _preempted(supervisor: Supervisor) -> str:
    tower = min(tower for tower, code in supervisor.endings.items() if code == EXIT_PREEMPTED)
    by = f" by {supervisor.forwarded.name}" if supervisor.forwarded is not None else ""
    status = supervisor.status_of(tower)
    return f"towers: preempted{by}: the towers ended {status}, with exit code {EXIT_PREEMPTED}"


def _failure(supervisor: Supervisor, result: RunResult) -> ExitReport:
    codes = {tower: code for tower, code in supervisor.endings.items() if code}
    if not codes:
        return ExitReport(1, f"towers: {supervisor.failed_elsewhere}")
    reports = {tower: FailureReport.read(report_path(supervisor.directory, tower)) for tower in codes}

    def order(tower: int) -> tuple[bool, float]:
        report = reports[tower]
        return (False, result.failures[tower].timestamp) if report is None else (report.consequence, report.time)

    for tower, report in reports.items():
        log.debug("tower %d ended with %d; its report: %s", tower, codes[tower], report.short if report else "none")
    first = min(codes, key=order)
    report, code = reports[first], codes[first]
    name, status = supervisor.name_of(first), supervisor.status_of(first)
    lines = []
    if report is not None:
        lines.append(f"towers: tower {first} failed:\n{report.trace.rstrip()}")
        sentence = f"{name} failed {status}: {report.short}"
    elif code < 0:
        sentence = f"{name} was ended by {signal_name(-code)} {status}"
    elif code == EXIT_PREEMPTED:
        sentence = f"{name} ended with exit code {code} {status}, and others did not, so nothing was saved together"
    else:
        sentence = f"{name} ended with exit code {code} {status}"
    lines.append(f"towers: {sentence}")
    is_consequence = report is not None and report.consequence
    cause = _cause(supervisor) if is_consequence else supervisor.broadcast.publish_failure(sentence)
    if cause not in (None, sentence):
        lines.append(f"towers: first of all, {cause}")
    return ExitReport(1 if code == EXIT_PREEMPTED else code if code > 0 else 128 - code, "\n".join(lines))


def _cause(supervisor: Supervisor) -> str | None:
    """Why the towers of this worker have failed, which only say that another tower is gone."""
    broadcast = supervisor.broadcast
    if (sentence := supervisor.first_good_end()) is not None:
        return broadcast.publish_failure(sentence)
    if (failure := broadcast.await_failure()) is not None:
        return failure
    return broadcast.publish_failure(ends[0]) if (ends := broadcast.ends()) else None
