"""Is N towers the same as one? Records a script's steps on both, compares them, and names the cause."""

from mirrored.verification.causes import Cause, Finding
from mirrored.verification.report import Report
from mirrored.verification.verify import verify

__all__ = ["Cause", "Finding", "Report", "verify"]
