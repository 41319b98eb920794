"""Measurements of a training: a monitor's reports, and the events of TensorBoard.

:mod:`.timeline` timestamps the phases of a tower. :mod:`.report` makes one report of all towers' timestamps.
:mod:`.monitor` has the object that a script uses; it adds memory, FLOPs and gradients. :mod:`.tracing` writes a trace
of all towers' steps.
"""

from mirrored.monitor.monitor import Monitor
from mirrored.monitor.report import Report
from mirrored.monitor.tracing import Trace

__all__ = ["Monitor", "Report", "Trace"]
