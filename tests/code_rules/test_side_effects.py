"""``import mirrored`` changes nothing outside of the package."""

from __future__ import annotations

from tests.support.programs import run_program

STATE = """\
import logging, os, signal, sys, threading, warnings
import numpy
import torch
import torch.nn.functional as F


def state():
    return {
        "finders": (list(sys.meta_path), list(sys.path_hooks), list(sys.path)),
        "hooks": (sys.excepthook, sys.exit, sys.displayhook, threading.excepthook, sys.stdout, sys.stderr),
        "signals": [signal.getsignal(number) for number in signal.valid_signals()],
        "warnings": list(warnings.filters),
        "logging": (logging.root.handlers[:], logging.root.level, logging.root.manager.disable),
        "environment": dict(os.environ),
        "threads": threading.enumerate(),
        "torch": (F.batch_norm, torch.save, torch.Tensor.backward, torch.get_num_threads(), torch.initial_seed()),
        "numpy": numpy.random.mtrand._rand._bit_generator,
    }


before = state()
import mirrored
mirrored.MirroredStrategy, mirrored.compute_average_loss, mirrored.CheckpointManager
after = state()
print([name for name in before if before[name] != after[name]])
"""


def test_an_import_changes_nothing_outside_of_the_package() -> None:
    assert run_program(["-c", STATE], code=0).stdout == "[]\n"
