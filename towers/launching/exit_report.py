"""How a job ended, as its agent says it: what to print, last of all, and the exit code."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket
from collections.abc import Mapping

from torch.distributed.elastic.agent.server.api import RunResult

from towers.health import status_record
from towers.health.failure import EXIT_PREEMPTED, read_report, report_in, signal_name
from towers.launching.failure_broadcast import News
from towers.launching.job import Job
from towers.launching.supervision import Supervisor, died_of


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Attributes:
        code: the exit code.
        text: what is printed last.
        died_of: the signal that ended it, if one did.
    """

    code: int = 0
    text: str = ""
    died_of: signal.Signals | None = None


def judge(job: Job, supervisor: Supervisor, result: RunResult, records: os.PathLike[str], news: News) -> Outcome:
    """Say how the towers of this worker ended.

    Args:
        result: what torchrun's agent says of them.
        records: the directory of the towers' whereabouts.
        news: tells other workers of a failure, or is told.
    """
    endings, told = supervisor.endings, supervisor.told
    if supervisor.elsewhere is None:
        codes = set(endings.values())
        if told is not None and codes & died_of(told):
            return Outcome(128 + told, died_of=told)
        if codes <= {0}:
            return Outcome()
        if codes <= {0, EXIT_PREEMPTED} and len(endings) == job.towers:
            return Outcome(EXIT_PREEMPTED, _preempted(supervisor, records))
    return _failure(job, supervisor, result, records, news)


def _preempted(supervisor: Supervisor, records: os.PathLike[str]) -> str:
    tower = min(tower for tower, code in supervisor.endings.items() if code == EXIT_PREEMPTED)
    by = f" by {supervisor.told.name}" if supervisor.told is not None else ""
    return f"towers: preempted{by}: the towers ended {_place(records, tower)}, with exit code {EXIT_PREEMPTED}"


def _failure(job: Job, supervisor: Supervisor, result: RunResult, records: os.PathLike[str], news: News) -> Outcome:
    codes = {tower: code for tower, code in supervisor.endings.items() if code}
    if not codes:
        return Outcome(1, f"towers: {supervisor.elsewhere}")
    reports = {tower: read_report(report_in(records, tower)) for tower in codes}

    def order(tower: int) -> tuple[bool, float]:
        report = reports[tower]
        return (False, result.failures[tower].timestamp) if report is None else (report.consequence, report.time)

    first = min(codes, key=order)
    report, code = reports[first], codes[first]
    name, place = f"tower {first}{_host(job)}", _place(records, first)
    lines = []
    if report is not None:
        lines.append(f"towers: tower {first} failed:\n{report.trace.rstrip()}")
        sentence = f"{name} failed {place}: {report.short}"
    elif code < 0:
        sentence = f"{name} was ended by {signal_name(-code)} {place}"
    elif code == EXIT_PREEMPTED:
        sentence = f"{name} ended with exit code {code} {place}, and others did not, so nothing was saved together"
    else:
        sentence = f"{name} ended with exit code {code} {place}"
    lines.append(f"towers: {sentence}")
    is_consequence = report is not None and report.consequence
    cause = _cause(job, supervisor, records, news) if is_consequence else news.say(sentence)
    if cause not in (None, sentence):
        lines.append(f"towers: first of all, {cause}")
    return Outcome(1 if code == EXIT_PREEMPTED else code if code > 0 else 128 - code, "\n".join(lines))


def _cause(job: Job, supervisor: Supervisor, records: os.PathLike[str], news: News) -> str | None:
    """Why the towers of this worker have failed, which only say that another tower is gone."""
    if (sentence := ended_well(job, supervisor.endings, records)) is not None:
        return news.say(sentence)
    if (said := news.await_what_was_said()) is not None:
        return said
    return news.say(ended[0]) if (ended := news.ended()) else None


def ended_well(job: Job, endings: Mapping[int, int], records: os.PathLike[str]) -> str | None:
    """Which tower of this worker was the first to end without failing, and where; for those that went on."""
    for tower, code in endings.items():
        if code in (0, EXIT_PREEMPTED):
            record = status_record.find(records, tower)
            place = _place(records, tower)
            whole = code == 0 and record is not None and record.read().is_between_runs
            call = " and made a call that it did not make: look for one under `if strategy.is_chief:`" if whole else ""
            return f"tower {tower}{_host(job)} ended with exit code {code} {place}, while others went on{call}"
    return None


def _host(job: Job) -> str:
    return f" on {socket.gethostname()} (worker {job.worker})" if job.workers > 1 else ""


def _place(records: os.PathLike[str], tower: int) -> str:
    record = status_record.find(records, tower)
    return str(record.read()) if record is not None else "before its strategy was made"
