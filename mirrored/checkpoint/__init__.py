"""Checkpoints: what is saved, how it survives a kill at any instant, and how a run goes on from it."""

from mirrored.checkpoint.errors import CheckpointError, Preempted
from mirrored.checkpoint.manager import CheckpointManager
from mirrored.checkpoint.weights import LoadReport, load_weights

__all__ = ["CheckpointError", "CheckpointManager", "LoadReport", "Preempted", "load_weights"]
