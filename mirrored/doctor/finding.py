"""What a check has found."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping


class Severity(enum.IntEnum):
    """How much a finding matters; only a problem makes the doctor fail."""

    OK = 0
    NOTE = 1
    WARNING = 2
    PROBLEM = 3


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        severity: a note is worth knowing; a warning costs speed or room, or will matter in some jobs; a problem keeps
            towers from working.
        subject: what was looked at, in a word or two.
        what: what was found.
        fix: how to mend it; empty where nothing is to be mended.
    """

    severity: Severity
    subject: str
    what: str
    fix: str = ""


Check = Callable[[Mapping[str, str]], Iterator[Finding]]
"""Looks at the machine and at an environment, and yields what it finds. It may raise: that is a finding, too."""


def ok(subject: str, what: str) -> Finding:
    """As it should be."""
    return Finding(Severity.OK, subject, what)


def note(subject: str, what: str, fix: str = "") -> Finding:
    """Worth knowing."""
    return Finding(Severity.NOTE, subject, what, fix)


def warning(subject: str, what: str, fix: str) -> Finding:
    """It costs speed or room, or will matter in some jobs."""
    return Finding(Severity.WARNING, subject, what, fix)


def problem(subject: str, what: str, fix: str) -> Finding:
    """It keeps towers from working."""
    return Finding(Severity.PROBLEM, subject, what, fix)
