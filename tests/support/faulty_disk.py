"""Disks that fail, or end the process, at one of their calls; and what is saved on them."""

from __future__ import annotations

import os
import pathlib
import signal
from typing import Any

import torch

import mirrored
from mirrored.checkpoint.folder import Disk

CALLS = ("create", "write", "fsync", "mkdir", "rename", "unlink", "rmdir")


class FaultyDisk(Disk):
    """Does something else at one of its calls: raises an error of that number or, without one, ends the process."""

    def __init__(self, at: int = 0, error: int | None = None) -> None:
        self.fail(at, error)

    def fail(self, at: int, error: int | None) -> None:
        """From here on, at the call of this number."""
        self.at, self.error, self.calls = at, error, 0

    def fault(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            if self.error is None:
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                raise OSError(self.error, os.strerror(self.error))


def _with_fault(name: str) -> Any:
    def call(self: FaultyDisk, *args: Any) -> Any:
        self.fault()
        if name == "write":  # a little at a time, as disks may
            return Disk.write(self, args[0], args[1][:1000])
        return getattr(Disk, name)(self, *args)

    return call


for _name in CALLS:
    setattr(FaultyDisk, _name, _with_fault(_name))


def saved_value(folder: pathlib.Path) -> int:
    """Which of the values that :func:`save_values` saved comes back."""
    progress = {"value": torch.zeros(500)}
    manager = mirrored.CheckpointManager(mirrored.OneDeviceStrategy(), folder, {"progress": progress})
    restored = manager.restore_newest()
    assert progress["value"].eq(progress["value"][0]).all()
    assert int(progress["value"][0]) == restored.step
    return restored.step


def save_values(folder: pathlib.Path, values: range, disk: Disk | None = None) -> mirrored.CheckpointManager:
    progress = {"value": torch.zeros(500)}
    manager = mirrored.CheckpointManager(
        mirrored.OneDeviceStrategy(), folder, {"progress": progress}, disk=disk, asynchronous=False
    )
    for value in values:
        progress["value"] = torch.full((500,), float(value))
        manager.steps = value
        manager.save()
    return manager
