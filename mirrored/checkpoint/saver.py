"""Saving: the towers that write gather the state of all towers, and a thread writes it. All towers learn the result.

[Note: what differs between towers] Mirrored parameters and the state of their optimizers are equal on all towers and
are written once. All other state (buffers, random numbers, a script's own dicts) may differ. Towers compare its
checksums, and save the differing values of each tower. So each tower's own BatchNorm statistics are restored; without
them, a resumed run would end with other bits. Tower 0's values are saved under their own names. Tower 2's
"model/bn.running_mean" is saved as "model/bn.running_mean@2".
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import platform
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from mirrored.checkpoint.codec import Encoder
from mirrored.checkpoint.errors import CheckpointError, raise_first
from mirrored.checkpoint.folder import Folder, FolderLock, take_lock
from mirrored.checkpoint.manifest import FORMAT, VERSION, Manifest, own_name
from mirrored.checkpoint.tensors import FileLayout, bytes_on_host, restore_layout
from mirrored.checkpoint.tracked import Tracked, TrackedOptimizer
from mirrored.strategy.base import Strategy
from towers.collectives.agreement import announce, announce_with_body
from towers.system.timeouts import clock

_LOCK = ".lock"
_LOCK_SECONDS = 5.0  # an earlier run that was killed may not have ended yet
_NICE = 15  # the writing thread uses the CPU time that training does not need


class Saver:
    """Saves the tracked objects of all towers in a folder. All towers must make the same calls.

    Args:
        folder: only one process at a time may write there.
        labels: additional fields of the manifests.

    Raises:
        CheckpointError: on all towers: the folder is not writable, or another run writes there.
    """

    def __init__(
        self, strategy: Strategy, folder: Folder, tracked: Sequence[Tracked], labels: Mapping[str, str] | None = None
    ) -> None:
        self._strategy = strategy
        self._comm = strategy.communicator
        self._folder = folder
        self._tracked = tracked
        self._labels = labels or {}
        self._writer: Writer | None = None
        self._in_flight = ""
        problem = ""
        if folder.elect_writer(self._comm) == self._comm.index:
            path = folder.path / _LOCK
            try:
                lock, is_new = take_lock(path, _LOCK_SECONDS)
                self._writer = Writer(folder, lock, strategy.health.saving)
                if is_new:  # otherwise, these may be unfinished files of another manager in this process
                    folder.clean()
            except BlockingIOError:
                problem = f"another process writes checkpoints into {folder.path}; use a separate folder for every run"
            except OSError as error:
                problem = f"{path} cannot be opened: {error.strerror}"
        raise_first(self._comm, "opens a folder of checkpoints", problem)

    @property
    def writes(self) -> bool:
        """Whether this tower writes."""
        return self._writer is not None

    def training(self) -> AbstractContextManager[None]:
        """Within it, no other manager of this process may save into the folder."""
        return contextlib.nullcontext() if self._writer is None else self._writer.training()

    @property
    def written_seconds(self) -> float:
        """The seconds that this tower needed to write the newest checkpoint; 0 if another tower writes."""
        return self._writer.seconds if self._writer is not None else 0.0

    def save(self, name: str, step: int, *, wait: bool) -> None:
        """Waits for a checkpoint that is still being written, then saves all tracked objects under ``name``.

        Raises:
            CheckpointError, DisagreementError, MirrorError, TypeError, ValueError: see ``CheckpointManager.save``.
        """
        self.wait()
        objects, own, tensors = self._capture(step)
        # Each writer writes its own copy of the mirrored state. Without mirror checks, all copies are assumed to be
        # equal.
        self._strategy.engine.check_before("saves a checkpoint of the state that all towers share")
        if self._writer is not None:
            self._writer.start(name, self._manifest(step, objects, own), tensors, asynchronous=not wait)
        self._in_flight = name
        if wait:
            self.wait()

    def wait(self) -> None:
        """Returns when no checkpoint is being written.

        Raises:
            CheckpointError: on all towers: writing the checkpoint failed.
        """
        name, self._in_flight = self._in_flight, ""
        if not name:
            return
        problem = self._writer.finish() if self._writer is not None else ""
        if problem:
            path = self._folder.path / name
            problem = f"checkpoint {path} could not be written ({problem}); earlier ones are as they were"
        raise_first(self._comm, f"waits for checkpoint {name}", problem)

    def _capture(self, step: int) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Tensor]]:
        """Gathers the state of all towers on the towers that write. All towers must call it.

        See [Note: what differs between towers].

        Returns:
            On towers that write: tower 0's encoded objects by name; for every tower, its objects that differ from tower
                0's; and the tensors by name, as views of the live ones.

        Raises:
            TypeError: on all towers: a value on one of them cannot be saved.
            ValueError: on all towers: reading a state failed on one of them, or the towers are at different steps.
            DisagreementError: on all towers: some make another call.
        """
        comm, encoder = self._comm, Encoder()
        objects: dict[str, Any] = {}
        checksums: dict[str, Any] = {"step": step, "writes": self.writes, "objects": {}, "tensors": {}}
        asks_optimizers = self.writes or not self._strategy.engine.one_tower_reads_state
        failed: Exception | None = None
        compared: dict[str, Tensor] = {}
        try:
            for item in self._tracked:
                if isinstance(item, TrackedOptimizer) and not asks_optimizers:
                    continue
                before = set(encoder.tensors)
                objects[item.name] = encoder.encode(item.state(), item.name, skip_code=item.skip_code)
                if comm.size > 1:
                    checksums["objects"][item.name] = _checksum(json.dumps(objects[item.name]).encode())
                    for name in encoder.tensors.keys() - before:
                        if not item.is_equal_everywhere(encoder.tensors[name]):
                            compared[name] = encoder.tensors[name]
            for (name, tensor), data in zip(compared.items(), bytes_on_host([*compared.values()]), strict=True):
                checksums["tensors"][name] = f"{tensor.dtype} {tuple(tensor.shape)}{_checksum(data.numpy())}"
        except Exception as error:  # a custom state_dict may raise any exception, and all towers must learn of it
            failed = error if isinstance(error, TypeError) else ValueError(f"{type(error).__name__}: {error}")
        towers = announce(comm, "saves a checkpoint", checksums, error=failed)
        first = towers[0]
        for tower, other in enumerate(towers):
            if other["step"] != first["step"]:
                raise ValueError(
                    f"tower {tower} saves step {other['step']}, tower 0 step {first['step']}: every tower must call "
                    "checkpoints.step() after each of its steps"
                )
        return objects, self._gather_differences(objects, encoder.tensors, towers), encoder.tensors

    def _gather_differences(
        self, objects: dict[str, Any], tensors: dict[str, Tensor], checksums: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Adds the values that differ between towers to ``objects`` and ``tensors``. Returns every tower's objects."""
        comm, own = self._comm, [dict[str, Any]() for _ in checksums]
        writers = [tower for tower, other in enumerate(checksums) if other["writes"]]
        other_objects = _differing([other["objects"] for other in checksums], writers)
        other_tensors = _differing([other["tensors"] for other in checksums], writers)
        if not other_objects[0] and not other_tensors[0]:
            return own
        package = _pack(
            {name: value for name, value in objects.items() if name in other_objects[comm.index]},
            {name: value for name, value in tensors.items() if name in other_tensors[comm.index]},
        )
        packages = announce_with_body(comm, "saves the state that differs between towers", body=package)
        for tower, announced in enumerate(packages if self.writes else ()):
            their_objects, their_tensors = _unpack(announced.body)
            (own[tower] if tower else objects).update(their_objects)
            tensors.update({own_name(name, tower) if tower else name: t for name, t in their_tensors.items()})
        return own

    def _manifest(self, step: int, objects: dict[str, Any], own: list[dict[str, Any]]) -> Manifest:
        return {
            **self._labels,
            "format": FORMAT,
            "version": VERSION,
            "step": step,
            "towers": self._comm.size,
            "virtual_towers": self._strategy.virtual_towers,
            "saved": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.version.__version__,
                "numpy": np.__version__,
            },
            "objects": objects,
            "own": own,
        }


class Writer:
    """Writes checkpoints into a folder, one at a time.

    Args:
        folder: the folder.
        lock: the folder's lock, held until this object is collected or the process ends.
        saving: creates a context that is entered while a checkpoint is written.

    Attributes:
        seconds: the time to write the newest checkpoint, without the copy.
        is_training: whether it is inside :meth:`training`.
    """

    def __init__(self, folder: Folder, lock: FolderLock, saving: Callable[[], AbstractContextManager[None]]) -> None:
        self._folder = folder
        self._lock = lock
        self._saving = saving
        self._thread: threading.Thread | None = None
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._error: Exception | None = None
        self.seconds = 0.0
        self.is_training = False

    def start(self, name: str, manifest: Manifest, tensors: Mapping[str, Tensor], *, asynchronous: bool) -> None:
        """Starts to write a checkpoint. :meth:`finish` must be called before the next one, and reports errors.

        Args:
            asynchronous: whether to return when the tensors are copied, and write in a thread; otherwise, it returns
                when all is written.
        """
        try:
            self._take_turn()
            layout = FileLayout(tensors)
            complete = {**manifest, "tensors": layout.unusual}
            if not asynchronous:
                self._write(name, complete, layout.pieces())
                return
            if self._memory.numel() < layout.nbytes:
                self._memory = torch.empty(layout.nbytes, dtype=torch.uint8, device="cpu")
            layout.copy_to(self._memory)
            arguments = (name, complete, layout.pieces(self._memory))
            # Not a daemon thread: a program that ends meanwhile still completes its last checkpoint.
            thread = threading.Thread(target=self._write_in_thread, args=arguments, name="mirrored-checkpoint")
            thread.start()
            self._thread = thread
        except (ValueError, RuntimeError, MemoryError) as error:  # not enough memory for the copy, or no thread
            self._error = error

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Within it, no other writer of this process may write into the folder."""
        self._lock.writers.append(weakref.ref(self))
        self.is_training = True
        try:
            yield
        finally:
            self.is_training = False

    def _take_turn(self) -> None:
        """Makes this the only writer of this process from now on.

        A writer that had the turn before does not get it again. Otherwise, two managers that save in turns would
        overwrite each other's checkpoints.

        Raises:
            CheckpointError: another one trains, or has had the turn since.
        """
        writers = [writer for reference in self._lock.writers if (writer := reference()) is not None]
        if writers and writers[-1] is self:
            return
        if self in writers or any(writer.is_training for writer in writers):
            raise CheckpointError(
                "another CheckpointManager of this script saves into the same folder, and the two would overwrite each "
                "other's checkpoints: give all objects to one manager, or each manager its own folder"
            )
        for writer in writers:
            writer.join()
        self._lock.writers = [weakref.ref(writer) for writer in (*writers, self)]

    def _write_in_thread(self, *arguments: Any) -> None:
        with contextlib.suppress(OSError, AttributeError):  # on Linux, this is the priority of this thread only
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        self._write(*arguments)

    def _write(self, name: str, manifest: Manifest, pieces: Iterable[memoryview]) -> None:
        started = clock.monotonic()
        try:
            with self._saving():
                self._folder.write(name, manifest, pieces)
        except Exception as error:
            self._error = error
        self.seconds = clock.monotonic() - started

    def join(self) -> None:
        """Returns when no checkpoint is being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def finish(self) -> str:
        """Waits until no checkpoint is being written. Returns the error since the last call, or ""."""
        self.join()
        error, self._error = self._error, None
        if error is None:
            return ""
        if isinstance(error, CheckpointError):
            return str(error)
        return error.strerror or str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def _differing(towers: Sequence[Mapping[str, str]], writers: Iterable[int]) -> list[set[str]]:
    """Returns the names of the values that each tower sends.

    Other towers send the values that differ from tower 0's. Tower 0 sends all values that differ on any tower, or that
    a tower that writes does not have.
    """
    differing = [{name for name, checksum in other.items() if checksum != towers[0].get(name)} for other in towers]
    lacking = [towers[0].keys() - towers[writer].keys() for writer in writers]
    return [set[str]().union(*differing, *lacking), *differing[1:]]


def _checksum(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _pack(objects: dict[str, Any], tensors: dict[str, Tensor]) -> bytes:
    layout = FileLayout(tensors)
    header = json.dumps({"objects": objects, "unusual": layout.unusual}).encode()
    return len(header).to_bytes(8, "little") + header + layout.packed()


def _unpack(package: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    end = 8 + int.from_bytes(package[:8], "little")
    header = json.loads(package[8:end])
    with torch.device("cpu"):
        tensors = safetensors.torch.load(package[end:])
    return header["objects"], {n: restore_layout(t, header["unusual"].get(n, {})) for n, t in tensors.items()}
