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
import functools
import hashlib
import json
import os
import platform
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

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
from towers.collectives.process_group import group_of_thread
from towers.system.timeouts import clock

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from mirrored.checkpoint.shards import Shards

_LOCK = ".lock"
_LOCK_SECONDS = 5.0  # an earlier run that was killed may not have ended yet
_ALIGNED = 64  # bytes
_MOMENT = 0.5  # seconds
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
        self._in_flight: tuple[str, Shards | None] | None = None
        self._group: Any = None
        lock, problem = None, ""
        if folder.elect_writer(self._comm) == self._comm.index:
            path = folder.path / _LOCK
            try:
                lock, is_new = take_lock(path, _LOCK_SECONDS)
                if is_new:  # otherwise, these may be unfinished files of another manager in this process
                    folder.clean()
            except BlockingIOError:
                problem = f"another process writes checkpoints into {folder.path}; use a separate folder for every run"
            except OSError as error:
                problem = f"{path} cannot be opened: {error.strerror}"
        raise_first(self._comm, "opens a folder of checkpoints", problem)
        self._writer = Writer(folder, lock, strategy.health.saving)

    @property
    def writes(self) -> bool:
        """Whether this tower writes the state that is not sharded, and the manifest."""
        return self._writer.writes

    def training(self) -> AbstractContextManager[None]:
        """Within it, no other manager of this process may save into the folder."""
        return self._writer.training()

    @property
    def written_seconds(self) -> float:
        """The seconds that this tower needed to write the newest checkpoint; 0 if only another tower has written."""
        return self._writer.seconds

    def save(self, name: str, step: int, *, wait: bool) -> None:
        """Waits for a checkpoint that is still being written, then saves all tracked objects under ``name``.

        Raises:
            CheckpointError, DisagreementError, MirrorError, TypeError, ValueError: see ``CheckpointManager.save``.
        """
        self.wait()
        objects, own, tensors, sharded = self._capture(step)
        # Each writer writes its own copy of the mirrored state. Without mirror checks, all copies are assumed to be
        # equal.
        self._strategy.engine.check_before("saves a checkpoint of the state that all towers share")
        shards = self._shards(sharded) if sharded else None
        if self.writes or shards is not None:
            manifest = self._manifest(step, objects, own)
            start = self._writer.prepare(name, manifest, tensors, shards, asynchronous=not wait)
            if shards is not None:  # no tower starts to write if another one cannot
                self._raise_first(f"starts to write checkpoint {name}", name)
            start()
        self._in_flight = name, shards
        if wait:
            self.wait()

    def wait(self) -> None:
        """Returns when no checkpoint is being written.

        Raises:
            CheckpointError: on all towers: writing the checkpoint failed.
        """
        if self._in_flight is None:
            return
        (name, shards), self._in_flight = self._in_flight, None
        if shards is not None:  # a tower whose disk hangs is found here, where a wait for it has a deadline
            with self._strategy.health.during(f"writing its parts of checkpoint {name}"):
                while self._writer.is_writing and not shards.are_written.wait(_MOMENT):
                    pass
            announce(self._comm, f"waits for all parts of checkpoint {name}")
        self._raise_first(f"waits for checkpoint {name}", name)

    def _raise_first(self, call: str, name: str) -> None:
        problem = self._writer.finish()
        if problem:
            path = self._folder.path / name
            problem = f"checkpoint {path} could not be written ({problem}); earlier ones are as they were"
        raise_first(self._comm, call, problem)

    def _shards(self, sharded: Mapping[str, DTensor]) -> Shards:
        """Returns the parts that this tower writes. All towers must call it.

        Raises:
            CheckpointError: on all towers: they do not share the folder.
        """
        from mirrored.checkpoint.shards import Shards  # it is slow to import

        writers = announce(self._comm, "saves sharded tensors", self.writes)
        if sum(writers) > 1:
            other = next(tower for tower in range(1, self._comm.size) if writers[tower])
            raise CheckpointError(
                f"{self._folder.path} of tower {other} is another folder than that of tower 0: towers that shard a "
                "model write one checkpoint together, so give them a folder that all hosts share"
            )
        if self._group is None:
            self._group = group_of_thread(self)
        return Shards(sharded, self._group, self._folder.disk.write_file)

    def _capture(self, step: int) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Tensor], dict[str, DTensor]]:
        """Gathers the state of all towers on the towers that write. All towers must call it.

        See [Note: what differs between towers].

        Returns:
            On towers that write: tower 0's encoded objects by name; for every tower, its objects that differ from tower
                0's; and the tensors by name, as views of the live ones. On all towers: the sharded tensors by name.

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
        own = self._gather_differences(objects, encoder.tensors, towers)
        return objects, own, encoder.tensors, encoder.sharded

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
    """Writes checkpoints into a folder, one at a time, or only this tower's parts of sharded tensors.

    Args:
        folder: the folder.
        lock: the folder's lock, held until this object is collected or the process ends. None: another tower has it,
            and writes all that is not sharded.
        saving: creates a context that is entered while a checkpoint is written.

    Attributes:
        seconds: the time to write the newest checkpoint, without the copy.
        is_training: whether it is inside :meth:`training`.
    """

    def __init__(
        self, folder: Folder, lock: FolderLock | None, saving: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._folder = folder
        self._lock = lock
        self._saving = saving
        self._thread: threading.Thread | None = None
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._error: Exception | None = None
        self.seconds = 0.0
        self.is_training = False

    @property
    def writes(self) -> bool:
        """Whether it writes all that is not sharded."""
        return self._lock is not None

    def prepare(
        self,
        name: str,
        manifest: Manifest,
        tensors: Mapping[str, Tensor],
        shards: Shards | None,
        *,
        asynchronous: bool,
    ) -> Callable[[], None]:
        """Prepares to write a checkpoint. :meth:`finish` reports the errors.

        Args:
            asynchronous: whether to copy the tensors now, and write in parallel with the caller.

        Returns:
            A function that starts to write. If ``asynchronous`` or with ``shards``, a thread writes.
        """
        try:
            layout = FileLayout(tensors if self.writes else {})
            parts = FileLayout({} if shards is None else shards.parts)
            memory = None
            if self.writes:
                self._take_turn()
            if asynchronous:
                start = -layout.nbytes % _ALIGNED + layout.nbytes
                if self._memory.numel() < start + parts.nbytes:
                    self._memory = torch.empty(start + parts.nbytes, dtype=torch.uint8, device="cpu")
                memory = self._memory[: layout.nbytes]
                layout.copy_to(memory)
                copies = parts.copy_to(self._memory[start : start + parts.nbytes])
                if shards is not None:
                    shards.parts = {n: copies[n].view(t.dtype).view(t.shape) for n, t in shards.parts.items()}
            complete = {**manifest, "tensors": layout.unusual}
        except (ValueError, RuntimeError, MemoryError) as error:  # not enough memory for the copy
            self._error = error
            return lambda: None
        work = functools.partial(self._write, name, complete, layout.pieces(memory), shards)
        if not asynchronous and shards is None:
            return work
        return functools.partial(
            self._start_thread, functools.partial(_in_background, work) if asynchronous else work, shards
        )

    def _start_thread(self, work: Callable[[], None], shards: Shards | None) -> None:
        # Not a daemon thread: a program that ends meanwhile still completes its last checkpoint.
        self._thread = threading.Thread(target=work, name="mirrored-checkpoint")
        try:
            self._thread.start()
        except RuntimeError as error:  # too many threads
            self._thread, self._error = None, error
            if shards is not None:
                shards.give_up(error)

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Within it, no other writer of this process may write into the folder."""
        if self._lock is not None:
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
        assert self._lock is not None
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

    def _write(self, name: str, manifest: Manifest, pieces: Iterable[memoryview], shards: Shards | None) -> None:
        started = clock.monotonic()
        try:
            with self._saving():
                if self.writes:
                    self._folder.write(name, manifest, pieces, shards)
                elif shards is not None:
                    shards.write(self._folder.path, coordinates=False)
        except Exception as error:
            if shards is None or not shards.failed_elsewhere:
                self._error = error
        self.seconds = clock.monotonic() - started

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written in a thread."""
        return self._thread is not None and self._thread.is_alive()

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


def _in_background(work: Callable[[], None]) -> None:
    with contextlib.suppress(OSError, AttributeError):  # on Linux, this is the priority of this thread only
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
    work()


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
