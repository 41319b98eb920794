"""Checks that N towers compute the same as one: records a script on both, compares the steps, and explains differences.

Inside the towers of a run: ``record`` (hooks, and the end of the script), ``watch`` (calls of torch), ``loss_graph``,
``draws`` (random numbers), ``files``, ``interventions`` (changes of a run). Each tower returns a ``trace``.
Afterwards: ``compare`` (differences between two runs), ``causes`` (the table of causes), ``facts`` (causes that traces
show), ``explain`` and ``proofs`` (further runs that prove a cause), ``report``. ``verify`` combines these.
"""

from mirrored.verification.causes import Cause, Explanation
from mirrored.verification.report import VerificationReport
from mirrored.verification.verify import verify

__all__ = ["Cause", "Explanation", "VerificationReport", "verify"]
