"""How a job ended, as its agent says it: what to print, last of all, and the exit code."""

from __future__ import annotations

import dataclasses
import os
import signal
import socket

from torch.distributed.elastic.agent.server.api import RunResult

from towers import whereabouts
from towers.failure import EXIT_PREEMPTED, details, signal_name
from towers.job import Job
from towers.news import News
from towers.supervision import Supervisor, died_of


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
        if codes <= {0, EXIT_PREEMPTED}:
            return Outcome(EXIT_PREEMPTED, _preempted(supervisor, records))
    return _failure(job, supervisor, result, records, news)


def _preempted(supervisor: Supervisor, records: os.PathLike[str]) -> str:
    tower = min(tower for tower, code in supervisor.endings.items() if code == EXIT_PREEMPTED)
    by = f" by {supervisor.told.name}" if supervisor.told is not None else ""
    return f"towers: preempted{by}: the towers ended {_place(records, tower)}, with exit code {EXIT_PREEMPTED}"


def _failure(job: Job, supervisor: Supervisor, result: RunResult, records: os.PathLike[str], news: News) -> Outcome:
    reports = {tower: details(failure.error_file_data) for tower, failure in result.failures.items()}
    codes = {tower: code for tower, code in supervisor.endings.items() if code}
    if not codes:
        return Outcome(1, f"towers: {supervisor.elsewhere}")

    def order(tower: int) -> tuple[bool, float]:
        report = reports.get(tower, {})
        return bool(report.get("consequence")), float(report.get("time") or result.failures[tower].timestamp)

    first = min(codes, key=order)
    report, code = reports.get(first, {}), codes[first]
    host = f" on {socket.gethostname()} (worker {job.worker})" if job.workers > 1 else ""
    where = f"tower {first}{host}", _place(records, first)
    if report:
        sentence = f"{where[0]} failed {where[1]}: {report.get('short', '')}"
    elif code < 0:
        sentence = f"{where[0]} was ended by {signal_name(-code)} {where[1]}"
    else:
        sentence = f"{where[0]} ended with exit code {code} {where[1]}"
    lines = []
    if trace := str(report.get("py_callstack", "")).rstrip():
        lines.append(f"towers: tower {first} failed:\n{trace}")
    lines.append(f"towers: {sentence}")
    cause = news.await_what_was_said() if report.get("consequence") else news.say(sentence)
    if cause not in (None, sentence):
        lines.append(f"towers: first of all, {cause}")
    return Outcome(code if code > 0 else 128 - code, "\n".join(lines))


def _place(records: os.PathLike[str], tower: int) -> str:
    record = whereabouts.find(records, tower)
    return str(record.read()) if record is not None else "before its strategy was made"
