"""What a training shows of itself: a monitor's reports, and the events of TensorBoard.

:mod:`.timeline` stamps what a tower does, :mod:`.report` makes one report of all towers' stamps, :mod:`.measuring`
adds what is not time (memory, FLOPs, gradients), and :mod:`.outputs` are the places where reports go.
:mod:`.monitor` has the object that a script holds. :mod:`.tracing` writes a trace of all towers' steps.
"""

from mirrored.monitor.monitor import Monitor
from mirrored.monitor.report import Report
from mirrored.monitor.tracing import Trace

__all__ = ["Monitor", "Report", "Trace"]
