"""Is N towers the same as one? Records a script's steps on both, compares them, and names the cause of a difference.

Inside the towers of a run: ``record`` (hooks, and when the script ends), ``watch`` (calls of torch), ``loss_graph``,
``draws`` (random numbers), ``padding``, ``interventions`` (what a run changes); a ``trace`` of each tower comes back.
Afterwards: ``compare`` (where two runs differ), ``causes`` (what traces show by themselves), ``explain`` (further runs
that prove a cause), ``proven_causes``, ``report``. ``verify`` puts these together.
"""

from mirrored.verification.report import Cause, Explanation, VerificationReport
from mirrored.verification.verify import verify

__all__ = ["Cause", "Explanation", "VerificationReport", "verify"]
