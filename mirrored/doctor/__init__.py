"""``mirrored doctor``: checks a machine for problems that would stop or slow down towers, and names the fix."""

from mirrored.doctor.examine import examine
from mirrored.doctor.findings import Finding, Report, Severity

__all__ = ["Finding", "Report", "Severity", "examine"]
