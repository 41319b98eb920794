"""What failures cost: how often to save, and how much of the time is left for training.

J. W. Young, "A first order approximation to the optimum checkpoint interval", 1974; J. T. Daly, "A higher order
estimate of the optimum checkpoint interval for restart dumps", 2006.
"""

from __future__ import annotations

import math


def interval(save: float, mtbf: float) -> float:
    """Seconds of training between two checkpoints that lose the least time: Young's sqrt(2 · save · MTBF).

    Args:
        save: seconds that training stands still for a checkpoint.
        mtbf: mean seconds between two failures of the job.
    """
    return math.sqrt(2 * save * mtbf)


def useful(save: float, mtbf: float, restart: float) -> float:
    """Share of the time that is training, when it is saved at :func:`interval` and work since then is lost.

    With failures that come independently of each other (exponential, Daly's complete model), not to first order only:
    where failures are frequent, the first order would go below nothing.

    Args:
        restart: seconds from a failure to the first step after it.
    """
    work = interval(save, mtbf)
    if work + save > 700 * mtbf:  # nothing ever ends; exp would overflow
        return 0.0
    return work / (mtbf * math.exp(restart / mtbf) * math.expm1((work + save) / mtbf))
