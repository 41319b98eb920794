"""Checkpoints: saved completely or not at all, whenever a run is killed, and resumed to the same bits.

A save passes :mod:`.manager`, :mod:`.saver` (state of all towers, from :mod:`.tracked` objects through :mod:`.codec`;
then a thread) and :mod:`.folder` (files, through :mod:`.tensors` and :mod:`.manifest`). A restore passes
:mod:`.manager`, :mod:`.restoring`, :mod:`.manifest` and :mod:`.tracked`.
"""

from mirrored.checkpoint.errors import CheckpointError, Preempted
from mirrored.checkpoint.manager import CheckpointManager
from mirrored.checkpoint.weights import LoadReport, load_weights, save_weights

__all__ = ["CheckpointError", "CheckpointManager", "LoadReport", "Preempted", "load_weights", "save_weights"]
