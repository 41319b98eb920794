"""A folder of checkpoints, in which every checkpoint is whole or absent; which tower writes there, and in which thread.

::

    results/run/
        step-00000100/    manifest.json, tensors.safetensors
        step-00000120/
        best/             a checkpoint that was given a name
        latest            a text: the name of the newest, for people and other programs
        .lock             held by the process that writes here
        .saving-…         being written, or left by a process that was killed meanwhile

A checkpoint is written under another name, flushed to the disk, and renamed; ``latest`` is replaced in the same way.

[Note: the newest checkpoint] It is found by listing the folder, not by ``latest``: that file is replaced after the
rename, so a kill between the two would hide a whole checkpoint. A run that went back to an earlier step renames later
checkpoints to ``replaced-…``: the next restart would take them for its own.

[Note: which tower writes] Hosts may share the folder (a network file system) or have one each under the same path. This
is found by trying: every tower makes a probe file, and the first tower whose probe a tower sees writes for it. So hosts
that share the folder write once, hosts with disks of their own write a copy each, and there is nothing to configure.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from mirrored.checkpoint.disk import Disk, FolderLock
from mirrored.checkpoint.errors import CheckpointError
from mirrored.checkpoint.manifest import LATEST, NAME, TENSORS, Manifest, dump, name_of, step_of
from mirrored.checkpoint.tensors import FileLayout
from towers.collectives.agreement import announce
from towers.collectives.communicator import Communicator
from towers.system.log import get_logger
from towers.system.timeouts import clock

log = get_logger("mirrored")

_SAVING, _REMOVING, _REPLACING, _PROBE = ".saving-", ".removing-", ".replacing-", ".probe-"
_NICE = 15  # the writing thread takes the CPU time that training leaves


class Folder:
    """Writes, lists and removes the checkpoints of one folder.

    Args:
        path: the folder; :meth:`elect_writer` makes it.
        disk: writes it.
    """

    def __init__(self, path: pathlib.Path, disk: Disk) -> None:
        self.path = path
        self.disk = disk

    def elect_writer(self, comm: Communicator) -> int:
        """The tower that writes into this tower's folder, which is made where it is missing. All towers call it.

        Raises:
            CheckpointError: on all towers, when the folder cannot be made or written on one of them.
        """
        token = secrets.token_hex(8)  # see [Note: which tower writes]
        probe = self.path / f"{_PROBE}{token}"
        problem = ""
        try:
            if not self.path.is_dir():
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileExistsError):  # another tower was faster, or the next line fails
                    self.disk.mkdir(self.path)
            os.close(self.disk.create(probe))
        except OSError as error:
            problem = f"{self.path} cannot be written to: {error.strerror}"
        try:
            towers = [a.details for a in announce(comm, "makes a CheckpointManager", [token, problem])]
            for tower, (_, error_text) in enumerate(towers):
                if error_text:
                    raise CheckpointError(f"tower {tower}: {error_text}")
            writer = next(i for i, (theirs, _) in enumerate(towers) if (self.path / f"{_PROBE}{theirs}").exists())
            comm.barrier()  # all towers have looked for the probes
            return writer
        finally:
            with contextlib.suppress(OSError):
                self.disk.unlink(probe)

    def steps(self) -> list[int]:
        """The steps that have a checkpoint here, unchecked, in ascending order; see [Note: the newest checkpoint]."""
        with contextlib.suppress(OSError):
            steps = (step_of(entry.name) for entry in os.scandir(self.path) if entry.is_dir(follow_symlinks=False))
            return sorted(step for step in steps if step is not None)
        return []

    def write(self, name: str, manifest: Manifest, pieces: Iterable[memoryview], keep: int) -> None:
        """Write a checkpoint, then remove the oldest steps beyond ``keep``.

        Checkpoints of later steps are renamed to ``replaced-…``; see [Note: the newest checkpoint].

        Raises:
            OSError, ValueError: something could not be written; earlier checkpoints are unchanged.
        """
        place = self.path / name
        temporary = self.path / f"{_SAVING}{name}-{os.getpid()}"
        try:
            self.disk.mkdir(temporary)
            size, checksum = self.disk.write_file(temporary / TENSORS, pieces)
            files = {TENSORS: {"bytes": size, "sha256": checksum}}
            self.disk.write_file(temporary / NAME, [memoryview(dump({**manifest, "files": files}))])
            self.disk.sync_folder(temporary)
            self._move_in(temporary, place)
        except BaseException:
            with contextlib.suppress(OSError):
                self.disk.remove(temporary)
            raise
        self.disk.sync_folder(self.path)
        try:
            self._tidy(name, keep)
        except OSError as error:
            log.warning("%s is saved, but what it replaces could not be removed (%s)", place, error.strerror)

    def _move_in(self, temporary: pathlib.Path, place: pathlib.Path) -> None:
        if not place.exists():
            self.disk.rename(temporary, place)
            return
        before = self.path / f"{_REPLACING}{place.name}"
        self.disk.rename(place, before)
        try:
            self.disk.rename(temporary, place)
        except OSError:
            self.disk.rename(before, place)
            raise

    def _tidy(self, name: str, keep: int) -> None:
        """Write ``latest``, and remove checkpoints that are no longer kept."""
        if (before := self.path / f"{_REPLACING}{name}").exists():
            self.disk.remove(before)
        if (step := step_of(name)) is None:
            return
        self.disk.replace_file(self.path / LATEST, f"{name}\n")
        for later in self.steps():
            if later > step:
                self._rename_replaced(self.path / name_of(later))
        for old in self.steps()[:-keep]:
            self._remove_whole(self.path / name_of(old))

    def _rename_replaced(self, place: pathlib.Path) -> None:
        aside = self.path / f"replaced-{place.name}"
        if aside.exists():
            self._remove_whole(aside)
        self.disk.rename(place, aside)
        log.warning("%s is of a later step than this run has come to: it was renamed to %s", place, aside.name)

    def _remove_whole(self, place: pathlib.Path) -> None:
        """Remove a checkpoint, after a rename, so that none is ever seen half removed."""
        away = self.path / f"{_REMOVING}{place.name}-{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):
            self.disk.remove(away)
        self.disk.rename(place, away)
        self.disk.remove(away)

    def clean(self) -> None:
        """Clear up after a process that was killed while it wrote: remove its files, put back what it was replacing."""
        with contextlib.suppress(OSError):
            for entry in self.path.iterdir():
                place = self.path / entry.name.removeprefix(_REPLACING)
                if entry.name.startswith(_REPLACING) and not place.exists():
                    self.disk.rename(entry, place)
                elif entry.name.startswith((_SAVING, _REMOVING, _REPLACING, _PROBE)):
                    if entry.is_dir():
                        log.info("%s was left by a run that ended while it saved; it is removed", entry)
                    self.disk.remove(entry)


class BackgroundWriter:
    """Writes checkpoints into a folder, one at a time.

    Args:
        folder: is written to.
        keep: how many steps are kept.
        lock: the folder's lock, held until all is written.
        saving: makes a context that is entered while a checkpoint is written.

    Attributes:
        seconds: how long it took to write the newest, after the copy.
    """

    def __init__(
        self, folder: Folder, keep: int, lock: FolderLock, saving: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._folder = folder
        self._lock = lock
        self._keep = keep
        self._saving = saving
        self._thread: threading.Thread | None = None
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._error: Exception | None = None
        self.seconds = 0.0

    def start(self, name: str, manifest: Manifest, tensors: Mapping[str, Tensor], *, asynchronous: bool) -> None:
        """Write a checkpoint, after :meth:`finish` for the one before; errors are reported by :meth:`finish`.

        Args:
            asynchronous: return when the tensors are copied, and write in a thread; else when all is written.
        """
        try:
            layout = FileLayout(tensors)
            whole = {**manifest, "tensors": layout.unusual}
            if not asynchronous:
                self._write(name, whole, layout.pieces())
                return
            if self._memory.numel() < layout.nbytes:
                self._memory = torch.empty(layout.nbytes, dtype=torch.uint8, device="cpu")
            layout.copy_to(self._memory)
            arguments = (name, whole, layout.pieces(self._memory))
            # Not a daemon: a program that ends meanwhile still completes its last checkpoint.
            thread = threading.Thread(target=self._write_in_thread, args=arguments, name="mirrored-checkpoint")
            thread.start()
            self._thread = thread
        except (ValueError, RuntimeError, MemoryError) as error:  # no memory for the copy, no thread
            self._error = error

    def _write_in_thread(self, *arguments: Any) -> None:
        with contextlib.suppress(OSError, AttributeError):  # Linux: the priority of this thread alone
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        self._write(*arguments)

    def _write(self, name: str, manifest: Manifest, pieces: Iterable[memoryview]) -> None:
        started = clock.monotonic()
        try:
            with self._saving():
                self._folder.write(name, manifest, pieces, self._keep)
        except Exception as error:
            self._error = error
        self.seconds = clock.monotonic() - started

    def finish(self) -> str:
        """Wait until nothing is being written; returns the error since the last call, empty without one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is None:
            return ""
        return error.strerror or str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
