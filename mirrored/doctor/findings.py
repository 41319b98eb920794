"""Findings, and the report that contains them."""

from __future__ import annotations

import dataclasses
import enum
import json
import textwrap
from collections.abc import Callable, Iterator, Mapping

_WIDTH = 110


class Severity(enum.IntEnum):
    """The importance of a finding. Only a problem makes the doctor fail."""

    OK = 0
    NOTE = 1
    WARNING = 2
    PROBLEM = 3


@dataclasses.dataclass(frozen=True)
class Finding:
    """One result of a check.

    Attributes:
        severity: a note is information; a warning costs speed or memory, or will matter in some jobs; a problem
            prevents towers from working.
        subject: the examined object, in a word or two.
        what: the result, in a sentence.
        fix: the remedy; warnings and problems have one.
    """

    severity: Severity
    subject: str
    what: str
    fix: str = ""


Check = Callable[[Mapping[str, str]], Iterator[Finding]]
"""A function that examines the machine and an environment. An exception that it raises also becomes a finding."""


def ok(subject: str, what: str) -> Finding:
    return Finding(Severity.OK, subject, what)


def note(subject: str, what: str, fix: str = "") -> Finding:
    return Finding(Severity.NOTE, subject, what, fix)


def warning(subject: str, what: str, fix: str) -> Finding:
    return Finding(Severity.WARNING, subject, what, fix)


def problem(subject: str, what: str, fix: str) -> Finding:
    return Finding(Severity.PROBLEM, subject, what, fix)


@dataclasses.dataclass(frozen=True)
class Report:
    """All findings on one machine.

    Attributes:
        host: the machine's name.
        system: kernel and processor.
        seconds: the duration of the checks.
        findings: in the order of the checks.
    """

    host: str
    system: str
    seconds: float
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """0 if there is no problem, otherwise 1."""
        return int(any(finding.severity is Severity.PROBLEM for finding in self.findings))

    def __str__(self) -> str:
        """Returns a table, sorted by severity: problems are last, each with its fix."""
        width = max((len(finding.subject) for finding in self.findings), default=0)
        lines = [f"mirrored doctor on {self.host} ({self.system}), {self.seconds:.0f} s", ""]
        for finding in sorted(self.findings, key=lambda finding: finding.severity):
            head = f"{finding.severity.name.lower():8} {finding.subject:{width}}  "
            lines += _wrapped(head, finding.what)
            if finding.fix:
                lines += _wrapped(" " * (len(head) - 5) + "fix: ", finding.fix)
        counts = {s: sum(finding.severity is s for finding in self.findings) for s in Severity}
        summary = [
            f"{counts[s] or 'no'} {s.name.lower()}{'' if counts[s] == 1 else 's'}"
            for s in (Severity.PROBLEM, Severity.WARNING)
        ]
        return "\n".join([*lines, "", ", ".join(summary)])

    def as_json(self) -> str:
        """Returns one JSON object with host, system, seconds, healthy, and findings (severity, subject, what, fix)."""
        content = {
            "host": self.host,
            "system": self.system,
            "seconds": round(self.seconds, 3),
            "healthy": self.exit_code == 0,
            "findings": [
                {**dataclasses.asdict(finding), "severity": finding.severity.name.lower()} for finding in self.findings
            ],
        }
        return json.dumps(content, indent=2)


def _wrapped(head: str, text: str) -> list[str]:
    text = " ".join(text.split())
    return textwrap.wrap(
        text, _WIDTH, initial_indent=head, subsequent_indent=" " * len(head), break_long_words=False
    ) or [head.rstrip()]
