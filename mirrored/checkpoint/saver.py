"""Saving: the state of all towers is gathered on those that write, and all towers learn the result.

[Note: what differs between towers] Mirrored parameters and the state of their optimizers are the same on all towers,
and are written once. Everything else (buffers, random numbers, a script's own dicts) may differ, whatever its kind:
towers compare it by checksums, and what differs is saved for each tower. So each tower's own statistics of BatchNorm
survive; without them a resumed run would end in other bits. The base is tower 0's; tower 2's "model/bn.running_mean"
is saved as "model/bn.running_mean@2".
"""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import platform
import time
from collections.abc import Sequence
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
from towers.collectives.communicator import Communicator, as_bytes

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
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                lock, is_new = take_lock(path / _LOCK)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return f"another process writes checkpoints into {path}; give every run a folder of its own"
                time.sleep(0.1)
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
            CheckpointError, DisagreementError, MirrorError, TypeError, ValueError: as of ``CheckpointManager.save``.
        """
        self.wait()
        engine = self._strategy.engine
        complete = self.writes or not engine.one_tower_reads_state
        captured = _capture(self._comm, self._tracked, step, self.writes, complete)
        # Mirrored state is written once, as tower 0 has it, so it has to be the same on all.
        engine.check_before("saves a checkpoint of what all towers hold")
        if self._writer is not None and captured is not None:
            manifest = self._manifest(step, captured)
            self._writer.start(name, manifest, captured.tensors, asynchronous=not wait)
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

    def _manifest(self, step: int, captured: _Captured) -> Manifest:
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
            "objects": captured.objects,
            "own": captured.own,
        }


@dataclasses.dataclass(frozen=True)
class _Captured:
    """The state of all towers.

    Attributes:
        objects: encoded state by name, as tower 0 has it.
        own: for every tower, those objects that differ from tower 0's.
        tensors: by name; views of the live tensors.
    """

    objects: dict[str, Any]
    own: list[dict[str, Any]]
    tensors: dict[str, Tensor]


def _capture(
    comm: Communicator, tracked: Sequence[Tracked], step: int, writes: bool, complete: bool
) -> _Captured | None:
    """Gather the state of all towers; all call it. See [Note: what differs between towers].

    Args:
        writes: whether this tower needs the result; the others get None.
        complete: whether this tower can and must ask its optimizers for their state.

    Raises:
        TypeError: on all towers, when something on one of them cannot be saved.
        ValueError: on all towers, when asking for a state failed on one of them, or their steps differ.
        DisagreementError: on all towers, when some call something else.
    """
    encoder = Encoder()
    objects: dict[str, Any] = {}
    checksums: dict[str, Any] = {"step": step, "objects": {}, "tensors": {}}
    failed: Exception | None = None
    try:
        for item in tracked if complete else [item for item in tracked if not isinstance(item, TrackedOptimizer)]:
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
    for tower, theirs in enumerate(towers):
        if theirs["step"] != towers[0]["step"]:
            raise ValueError(
                f"tower {tower} saves step {theirs['step']}, tower 0 step {towers[0]['step']}: every tower must call "
                "checkpoints.step() after each of its steps"
            )
    different = {kind: _different([theirs[kind] for theirs in towers]) for kind in ("objects", "tensors")}
    if not different["objects"] and not different["tensors"]:
        return _Captured(objects, [{} for _ in towers], encoder.tensors) if writes else None
    mine = _pack(
        {name: objects[name] for name in different["objects"] if name in objects},
        {name: encoder.tensors[name] for name in different["tensors"] if name in encoder.tensors},
    )
    packages = [announced.body for announced in announce(comm, "saves what differs between towers", body=mine)]
    return _join(objects, encoder.tensors, [_unpack(package) for package in packages], towers) if writes else None


def _different(towers: Sequence[dict[str, str]]) -> list[str]:
    """The names whose checksums are not the same on all towers that have one, or that tower 0 does not have."""
    names = {name: None for tower in towers for name in tower}
    return [
        name for name in names if len({tower[name] for tower in towers if name in tower}) > 1 or name not in towers[0]
    ]


def _join(
    objects: dict[str, Any],
    tensors: dict[str, Tensor],
    packages: Sequence[tuple[dict[str, Any], dict[str, Tensor]]],
    checksums: Sequence[dict[str, Any]],
) -> _Captured:
    base, own = {**objects, **packages[0][0]}, [dict[str, Any]() for _ in packages]
    whole = {**tensors, **packages[0][1]}
    first = checksums[0]
    for tower, (their_objects, their_tensors) in enumerate(packages[1:], start=1):
        theirs = checksums[tower]
        own[tower] = {n: v for n, v in their_objects.items() if first["objects"].get(n) != theirs["objects"][n]}
        for name, tensor in their_tensors.items():
            if first["tensors"].get(name) != theirs["tensors"][name]:
                whole[own_name(name, tower)] = tensor
    return _Captured(base, own, whole)


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
