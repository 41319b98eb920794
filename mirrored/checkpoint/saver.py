"""Saving together: what all towers hold is brought to those that write, and all are told how it went."""

from __future__ import annotations

import datetime
import platform
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mirrored.checkpoint import lock
from mirrored.checkpoint.capture import capture
from mirrored.checkpoint.folder import Folder
from mirrored.checkpoint.manifest import FORMAT, VERSION, Manifest
from mirrored.checkpoint.places import writer_of
from mirrored.checkpoint.together import raise_first
from mirrored.checkpoint.tracked import Tracked
from mirrored.checkpoint.writer import Writer
from mirrored.strategy.base import Strategy

_LOCK = ".lock"
_LOCK_SECONDS = 5.0  # an earlier run that was killed may still be ending


class Saver:
    """Saves a strategy's state in a folder. All towers make the same calls.

    Args:
        strategy: whose towers.
        folder: where; one process at a time writes there.
        keep: how many steps are kept.

    Raises:
        CheckpointError: on all towers: the folder cannot be written to, or another run writes there.
    """

    def __init__(self, strategy: Strategy, folder: Folder, keep: int) -> None:
        self._strategy = strategy
        self._comm = strategy.communicator
        self._folder = folder
        self._writer: Writer | None = None
        self._in_flight = ""
        problem = ""
        if writer_of(self._comm, folder.path, folder.disk) == self._comm.index:
            problem = self._take_folder(keep)
        raise_first(self._comm, "opens a folder of checkpoints", problem)

    def _take_folder(self, keep: int) -> str:
        """Take the folder for writing, and clear away what a killed run left; returns what is wrong."""
        path = self._folder.path
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                held, is_new = lock.take(path / _LOCK)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return f"another process writes checkpoints into {path}; give every run a folder of its own"
                time.sleep(0.1)
            except OSError as error:
                return f"{path / _LOCK} cannot be opened: {error.strerror}"
        self._writer = Writer(self._folder, keep, held, self._strategy.health.saving)
        if is_new:  # else another manager may be writing what would be cleared away
            self._folder.clean()
        return ""

    @property
    def writes(self) -> bool:
        """Whether this tower does the writing."""
        return self._writer is not None

    @property
    def written_seconds(self) -> float:
        """How long this tower wrote the newest checkpoint; 0 where another tower writes."""
        return self._writer.seconds if self._writer is not None else 0.0

    def save(self, name: str, tracked: Sequence[Tracked], step: int, *, wait: bool) -> None:
        """Save what is tracked under ``name``; first waits for what is still being written.

        Raises:
            CheckpointError, DisagreementError, MirrorError, TypeError, ValueError: as of ``CheckpointManager.save``.
        """
        self.wait()
        complete = self.writes or not self._strategy.engine.one_tower_reads_state
        captured = capture(self._comm, tracked, step, self.writes, complete)
        # What is mirrored is written once, as tower 0 has it.
        self._strategy.engine.check_before("saves a checkpoint of what all towers hold")
        if self._writer is not None and captured is not None:
            manifest = self._manifest(step, captured.objects, captured.own)
            self._writer.start(name, manifest, captured.tensors, beside=not wait)
        self._in_flight = name
        if wait:
            self.wait()

    def wait(self) -> None:
        """Return when nothing is being written.

        Raises:
            CheckpointError: on all towers: the checkpoint that was being written could not be.
        """
        name, self._in_flight = self._in_flight, ""
        if not name:
            return
        problem = ""
        if self._writer is not None:
            self._writer.wait()
            problem = self._writer.outcome()
        if problem:
            place = self._folder.path / name
            problem = f"checkpoint {place} could not be written ({problem}); earlier ones are as they were"
        raise_first(self._comm, f"waits for checkpoint {name}", problem)

    def _manifest(self, step: int, objects: dict[str, Any], own: list[dict[str, Any]]) -> Manifest:
        return {
            "format": FORMAT,
            "version": VERSION,
            "step": step,
            "towers": self._comm.size,
            "virtual_towers": self._strategy.virtual_towers,
            "saved": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
            "objects": objects,
            "own": own,
        }
