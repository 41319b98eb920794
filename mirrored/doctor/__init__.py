"""``mirrored doctor``: what on this machine would keep towers from starting, or from being fast, and how to mend it."""

from mirrored.doctor.examine import examine
from mirrored.doctor.finding import Finding, Severity
from mirrored.doctor.report import Report

__all__ = ["Finding", "Report", "Severity", "examine"]
