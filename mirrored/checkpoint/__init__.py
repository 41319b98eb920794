"""Checkpoints that are saved completely or not at all, even if a run is killed, and resumed to the same bits.

:mod:`.manager` calls :mod:`.saver` to save. The saver collects the state of all towers from the objects of
:mod:`.tracked`, encoded by :mod:`.codec`. A thread then writes the files through :mod:`.folder`, :mod:`.tensors` and
:mod:`.manifest`. To restore, :mod:`.manager` calls :mod:`.restoring`, which uses :mod:`.manifest` and :mod:`.tracked`.
"""

from mirrored.checkpoint.errors import CheckpointError, Preempted
from mirrored.checkpoint.manager import CheckpointManager
from mirrored.checkpoint.reading import LoadReport, load_weights, save_weights

__all__ = ["CheckpointError", "CheckpointManager", "LoadReport", "Preempted", "load_weights", "save_weights"]
