"""Writing beside the training: a copy of the state, and a thread that takes it to the disk."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from mirrored.checkpoint.folder import Folder
from mirrored.checkpoint.lock import Lock
from mirrored.checkpoint.manifest import Manifest
from mirrored.checkpoint.tensors import Layout

_NICE = 15  # writing takes what training leaves of the cores


class Writer:
    """Writes checkpoints into a folder, one at a time.

    Args:
        folder: where.
        keep: how many steps are kept.
        lock: says that this process writes there; held until all is written.
        saving: is entered while a checkpoint is written.

    Attributes:
        seconds: how long the newest took, from the copy to the last rename.
    """

    def __init__(
        self, folder: Folder, keep: int, lock: Lock, saving: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._folder = folder
        self._lock = lock
        self._keep = keep
        self._saving = saving
        self._thread: threading.Thread | None = None
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._error: Exception | None = None
        self.seconds = 0.0

    def start(self, name: str, manifest: Manifest, tensors: Mapping[str, Tensor], *, beside: bool) -> None:
        """Write a checkpoint; nothing else may be being written. What goes wrong :meth:`outcome` tells.

        Args:
            beside: return when the tensors are copied, and write while training goes on; else when all is written.
        """
        try:
            layout = Layout(tensors)
            whole = {**manifest, "tensors": layout.unusual}
            if not beside:
                self._write(name, whole, layout.pieces())
                return
            if self._memory.numel() < layout.nbytes:
                self._memory = torch.empty(layout.nbytes, dtype=torch.uint8, device="cpu")
            layout.copy_to(self._memory)
            arguments = (name, whole, layout.pieces_of(self._memory))
            # Not a daemon: a program that ends meanwhile has its last checkpoint.
            thread = threading.Thread(target=self._write_beside, args=arguments, name="mirrored-checkpoint")
            thread.start()
            self._thread = thread
        except (ValueError, RuntimeError, MemoryError) as error:  # no memory for the copy, no thread
            self._error = error

    def _write_beside(self, *arguments: Any) -> None:
        with contextlib.suppress(OSError, AttributeError):  # Linux: the priority of this thread alone
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        self._write(*arguments)

    def _write(self, name: str, manifest: Manifest, pieces: Iterable[memoryview]) -> None:
        started = time.monotonic()
        try:
            with self._saving():
                self._folder.write(name, manifest, pieces, self._keep)
        except Exception as error:
            self._error = error
        self.seconds = time.monotonic() - started

    def wait(self) -> None:
        """Return when nothing is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def outcome(self) -> str:
        """What went wrong since the last time it was asked; empty when nothing did."""
        error, self._error = self._error, None
        if error is None:
            return ""
        return error.strerror or str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
