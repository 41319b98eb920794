"""``mirrored doctor``: checks a machine for whatever would stop towers or slow them down, and names the fix."""

from mirrored.doctor.examine import examine
from mirrored.doctor.findings import Finding, Report, Severity

__all__ = ["Finding", "Report", "Severity", "examine"]
