"""Saving: the state of all towers is gathered on those that write, and all towers learn the result.

[Note: what differs between towers] Mirrored parameters and the state of their optimizers are the same on all towers,
and are written once. Everything else (buffers, random numbers, a script's own dicts) may differ, whatever its kind:
towers compare it by checksums, and what differs is saved for each tower. So each tower's own statistics of BatchNorm
survive; without them a resumed run would end in other bits. The base is tower 0's; tower 2's "model/bn.running_mean"
is saved as "model/bn.running_mean@2".
"""

from __future__ import annotations

import datetime
import hashlib
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from mirrored.checkpoint.codec import Encoder
from mirrored.checkpoint.disk import take_lock
from mirrored.checkpoint.errors import raise_first
from mirrored.checkpoint.folder import BackgroundWriter, Folder
from mirrored.checkpoint.manifest import FORMAT, VERSION, Manifest, own_name
from mirrored.checkpoint.tensors import FileLayout, restore_layout
from mirrored.checkpoint.tracked import Tracked, TrackedOptimizer
from mirrored.strategy.base import Strategy
from towers.collectives.agreement import announce
from towers.collectives.communicator import as_bytes
from towers.system.timeouts import Deadline, clock

_LOCK = ".lock"
_LOCK_SECONDS = 5.0  # an earlier run that was killed may still be ending


class Saver:
    """Saves the tracked objects of all towers in a folder. All towers make the same calls.

    Args:
        folder: one process at a time writes there.
        keep: how many steps are kept.

    Raises:
        CheckpointError: on all towers: the folder cannot be written to, or another run writes there.
    """

    def __init__(self, strategy: Strategy, folder: Folder, tracked: Sequence[Tracked], keep: int) -> None:
        self._strategy = strategy
        self._comm = strategy.communicator
        self._folder = folder
        self._tracked = tracked
        self._writer: BackgroundWriter | None = None
        self._in_flight = ""
        problem = ""
        if folder.elect_writer(self._comm) == self._comm.index:
            problem = self._lock_folder(keep)
        raise_first(self._comm, "opens a folder of checkpoints", problem)

    def _lock_folder(self, keep: int) -> str:
        """Take the folder's lock, and clear up after a killed run; returns an error message, empty without one."""
        path = self._folder.path
        deadline = Deadline(_LOCK_SECONDS)
        while True:
            try:
                lock, is_new = take_lock(path / _LOCK)
                break
            except BlockingIOError:
                if deadline.has_passed():
                    return f"another process writes checkpoints into {path}; give every run a folder of its own"
                clock.sleep(0.1)
            except OSError as error:
                return f"{path / _LOCK} cannot be opened: {error.strerror}"
        self._writer = BackgroundWriter(self._folder, keep, lock, self._strategy.health.saving)
        if is_new:  # else another manager of this process may be writing what looks left over
            self._folder.clean()
        return ""

    @property
    def writes(self) -> bool:
        """Whether this tower writes."""
        return self._writer is not None

    @property
    def written_seconds(self) -> float:
        """How long this tower wrote the newest checkpoint; 0 where another tower writes."""
        return self._writer.seconds if self._writer is not None else 0.0

    def save(self, name: str, step: int, *, wait: bool) -> None:
        """Save all tracked objects under ``name``; first waits for a checkpoint that is still being written.

        Raises:
            CheckpointError, DisagreementError, MirrorError, TypeError, ValueError: see ``CheckpointManager.save``.
        """
        self.wait()
        engine = self._strategy.engine
        objects, own, tensors = self._capture(step)
        # Mirrored state is written once, as tower 0 has it, so it has to be the same on all.
        engine.check_before("saves a checkpoint of what all towers hold")
        if self._writer is not None:
            self._writer.start(name, self._manifest(step, objects, own), tensors, asynchronous=not wait)
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
        problem = self._writer.finish() if self._writer is not None else ""
        if problem:
            path = self._folder.path / name
            problem = f"checkpoint {path} could not be written ({problem}); earlier ones are as they were"
        raise_first(self._comm, f"waits for checkpoint {name}", problem)

    def _capture(self, step: int) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, Tensor]]:
        """Gather the state of all towers on those that write; all call it. See [Note: what differs between towers].

        Returns:
            On towers that write: the encoded state of the objects by name, as tower 0 has it; for every tower, those
            objects that differ from tower 0's; and the tensors by name, views of the live ones.

        Raises:
            TypeError: on all towers, when something on one of them cannot be saved.
            ValueError: on all towers, when asking for a state failed on one of them, or their steps differ.
            DisagreementError: on all towers, when some call something else.
        """
        comm, encoder = self._comm, Encoder()
        objects: dict[str, Any] = {}
        checksums: dict[str, Any] = {"step": step, "writes": self.writes, "objects": {}, "tensors": {}}
        asks_optimizers = self.writes or not self._strategy.engine.one_tower_reads_state
        failed: Exception | None = None
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
                            checksums["tensors"][name] = _checksum_of(encoder.tensors[name])
        except Exception as error:  # a state_dict of the user's may raise anything; all towers have to know
            failed = error if isinstance(error, TypeError) else ValueError(f"{type(error).__name__}: {error}")
        towers = [announced.details for announced in announce(comm, "saves a checkpoint", checksums, error=failed)]
        first = towers[0]
        for tower, theirs in enumerate(towers):
            if theirs["step"] != first["step"]:
                raise ValueError(
                    f"tower {tower} saves step {theirs['step']}, tower 0 step {first['step']}: every tower must call "
                    "checkpoints.step() after each of its steps"
                )
        return objects, self._exchange(objects, encoder.tensors, towers), encoder.tensors

    def _exchange(
        self, objects: dict[str, Any], tensors: dict[str, Tensor], checksums: Sequence[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Add what differs between towers to ``objects`` and ``tensors``; returns every tower's own objects."""
        comm, own = self._comm, [dict[str, Any]() for _ in checksums]
        writers = [tower for tower, theirs in enumerate(checksums) if theirs["writes"]]
        other_objects = _differing([theirs["objects"] for theirs in checksums], writers)
        other_tensors = _differing([theirs["tensors"] for theirs in checksums], writers)
        if not other_objects[0] and not other_tensors[0]:
            return own
        mine = _pack(
            {name: value for name, value in objects.items() if name in other_objects[comm.index]},
            {name: value for name, value in tensors.items() if name in other_tensors[comm.index]},
        )
        packages = announce(comm, "saves what differs between towers", body=mine)
        for tower, announced in enumerate(packages if self.writes else ()):
            their_objects, their_tensors = _unpack(announced.body)
            (own[tower] if tower else objects).update(their_objects)
            tensors.update({own_name(name, tower) if tower else name: t for name, t in their_tensors.items()})
        return own

    def _manifest(self, step: int, objects: dict[str, Any], own: list[dict[str, Any]]) -> Manifest:
        return {
            "format": FORMAT,
            "version": VERSION,
            "step": step,
            "towers": self._comm.size,
            "virtual_towers": self._strategy.virtual_towers,
            "saved": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "versions": {
                "python": platform.python_version(),
                "torch": torch.version.__version__,
                "numpy": np.__version__,
            },
            "objects": objects,
            "own": own,
        }


def _differing(towers: Sequence[Mapping[str, str]], writers: Iterable[int]) -> list[set[str]]:
    """For each tower the names whose checksums are not tower 0's; for tower 0 those that differ on any.

    For tower 0 also those that one of the ``writers`` does not have.
    """
    differing = [{name for name, checksum in theirs.items() if checksum != towers[0].get(name)} for theirs in towers]
    lacking = [towers[0].keys() - towers[writer].keys() for writer in writers]
    return [set[str]().union(*differing, *lacking), *differing[1:]]


def _checksum_of(tensor: Tensor) -> str:
    kind = f"{tensor.dtype} {tuple(tensor.shape)}"
    return kind + _checksum(as_bytes(tensor).cpu().numpy())


def _checksum(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _pack(objects: dict[str, Any], tensors: dict[str, Tensor]) -> bytes:
    layout = FileLayout(tensors)
    header = json.dumps({"objects": objects, "unusual": layout.unusual}).encode()
    return b"".join([len(header).to_bytes(8, "little"), header, *layout.pieces()])


def _unpack(package: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    end = 8 + int.from_bytes(package[:8], "little")
    header = json.loads(package[8:end])
    with torch.device("cpu"):
        tensors = safetensors.torch.load(package[end:])
    return header["objects"], {n: restore_layout(t, header["unusual"].get(n, {})) for n, t in tensors.items()}
