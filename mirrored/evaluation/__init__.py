"""An evaluator beside a training: it watches the folder of checkpoints, and evaluates each new one.

:mod:`.watching` finds new checkpoints and holds them, and :mod:`.evaluator` evaluates them and keeps the table.
"""

from mirrored.evaluation.evaluator import EarlyStopping, Evaluator, Exporter, is_evaluator
from mirrored.evaluation.watching import checkpoints_iterator

__all__ = ["EarlyStopping", "Evaluator", "Exporter", "checkpoints_iterator", "is_evaluator"]
