"""An evaluator in parallel with a training: it watches the folder of checkpoints, and evaluates each new one.

:mod:`.watching` finds new checkpoints and holds them. :mod:`.evaluator` evaluates them and keeps the table.
"""

from mirrored.cluster.tf_config import is_evaluator
from mirrored.evaluation.evaluator import EarlyStopping, EvalSpec, Evaluator, Exporter, TrainSpec
from mirrored.evaluation.watching import checkpoints_iterator

__all__ = ["EarlyStopping", "EvalSpec", "Evaluator", "Exporter", "TrainSpec", "checkpoints_iterator", "is_evaluator"]
