"""What ``mirrored doctor`` prints."""

from __future__ import annotations

import dataclasses
import json
import textwrap

from mirrored.doctor.finding import Finding, Severity

_WIDTH = 110


@dataclasses.dataclass(frozen=True)
class Report:
    """Everything that was found on one machine.

    Attributes:
        host: its name.
        system: kernel and processor.
        seconds: how long it took.
        findings: in the order of the checks.
    """

    host: str
    system: str
    seconds: float
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """0 when there is no problem, else 1."""
        return int(any(finding.severity is Severity.PROBLEM for finding in self.findings))

    def __str__(self) -> str:
        """A table: what is well first, problems last, each with its fix."""
        width = max((len(finding.subject) for finding in self.findings), default=0)
        lines = [f"mirrored doctor on {self.host} ({self.system}), {self.seconds:.0f} s", ""]
        for severity in Severity:
            for finding in self.findings:
                if finding.severity is severity:
                    head = f"{severity.name.lower():8} {finding.subject:{width}}  "
                    lines += _wrapped(head, finding.what)
                    if finding.fix:
                        lines += _wrapped(" " * (len(head) - 5) + "fix: ", finding.fix)
        return "\n".join([*lines, "", self._summary()])

    def _summary(self) -> str:
        counts = {s: sum(finding.severity is s for finding in self.findings) for s in Severity}
        parts = [
            f"{counts[s] or 'no'} {s.name.lower()}{'' if counts[s] == 1 else 's'}"
            for s in (Severity.PROBLEM, Severity.WARNING)
        ]
        return ", ".join(parts)

    def as_json(self) -> str:
        """One JSON object: host, system, seconds, healthy, and findings with severity, subject, what and fix."""
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
