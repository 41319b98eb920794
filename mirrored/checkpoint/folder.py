"""A folder of checkpoints, in which every checkpoint is whole or not there.

::

    results/run/
        step-00000100/    manifest.json, tensors.safetensors
        step-00000120/
        best/             a checkpoint that was given a name
        latest            a text: the name of the newest
        .lock             held by the process that writes here
        .saving-…         being written, or left by a process that was killed meanwhile

A checkpoint is written beside, flushed to the disk, and renamed; then ``latest`` is replaced in the same way.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pathlib
import re
import stat
from collections.abc import Iterable

from mirrored.checkpoint import manifest as manifests
from mirrored.checkpoint.codec import Malformed
from mirrored.checkpoint.disk import Disk
from mirrored.checkpoint.errors import CheckpointError, some_of
from mirrored.checkpoint.manifest import NAME, TENSORS, Manifest
from mirrored.checkpoint.tensors import TensorFile
from towers.system.log import get_logger

log = get_logger("mirrored")

LATEST = "latest"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_STEP = re.compile(r"step-([0-9]{8,})")
_SAVING, _REMOVING, _REPLACING = ".saving-", ".removing-", ".replacing-"
PROBE = ".probe-"
"""How the names of files begin by which towers find out who sees them."""


def check_name(name: str) -> str:
    """``name``, if it is one that cannot lead out of a folder.

    Raises:
        ValueError: it is not.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name == LATEST:
        raise ValueError(
            f"a checkpoint's name is {name!r}, but must be letters, digits, '.', '_' and '-', begin with a letter or a "
            f"digit, and not be {LATEST!r}; it names a folder beside the others, not a path"
        )
    return name


def is_step(name: str) -> bool:
    """Whether a name looks like that of a step's checkpoint."""
    return _STEP.fullmatch(name) is not None


def step_of(name: str) -> int | None:
    """The step of whose checkpoint this is the name; None where it is no step's."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and name == name_of(int(match[1])) else None


def name_of(step: int) -> str:
    """The name of the checkpoint of a step."""
    return f"step-{step:08d}"


class Opened:
    """A checkpoint that was found whole; read it, then close it.

    Attributes:
        path: where it lies.
        manifest: what it holds.
        tensors: its tensors.
    """

    def __init__(self, path: pathlib.Path, *, check: bool = True) -> None:
        """Open what lies at ``path``.

        Args:
            check: read all of it, and compare checksums.

        Raises:
            CheckpointError: it is not there, or not whole; the text names the file.
        """
        self.path = path
        try:
            self._open(check)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None

    def _open(self, check: bool) -> None:
        path = self.path
        with contextlib.ExitStack() as opened:
            folder = _open(path, os.O_DIRECTORY, "folder")
            opened.callback(os.close, folder)
            self.manifest = self._read_manifest(folder)
            self._refuse_strangers(folder)
            data = _open(path / TENSORS, 0, "file", folder)
            opened.callback(os.close, data)
            self._check_tensors(data, check)
            try:
                self.tensors = TensorFile(f"/proc/self/fd/{data}", self.manifest["tensors"])
            except Malformed as error:
                raise CheckpointError(f"{path / TENSORS} cannot be read: {error}") from None

    def _read_manifest(self, folder: int) -> Manifest:
        path = self.path / NAME
        descriptor = _open(path, 0, "file", folder)
        with open(descriptor, "rb") as file:
            text = file.read(manifests.LARGEST + 1)
        try:
            found = manifests.load(text)
            if is_step(self.path.name) and step_of(self.path.name) != found["step"]:
                raise Malformed(f"it is of step {found['step']}: the folder was renamed, or the manifest forged")
            return found
        except Malformed as error:
            raise CheckpointError(f"{path} cannot be used: {error}") from None

    def _refuse_strangers(self, folder: int) -> None:
        strangers = {name for name in os.listdir(folder) if not name.startswith(".")} - {NAME, TENSORS}
        if strangers:
            raise CheckpointError(
                f"{self.path} holds {some_of(sorted(strangers))}, which no checkpoint has: remove it, if it is yours"
            )

    def _check_tensors(self, descriptor: int, check: bool) -> None:
        path, stated = self.path / TENSORS, self.manifest["files"][TENSORS]
        size = os.fstat(descriptor).st_size
        if size != stated["bytes"]:
            raise CheckpointError(f"{path} is {size} bytes long, but was written with {stated['bytes']}: it is damaged")
        if check and _checksum(descriptor) != stated.get("sha256"):
            raise CheckpointError(f"{path} has another checksum than when it was written: it is damaged")

    def lacks(self, name: str) -> str:
        """That there is no object of a name, in words; empty where there is one."""
        objects = self.manifest["objects"]
        own = some_of(each for each in objects if not each.startswith("mirrored."))
        return "" if name in objects else f"it holds no {name!r}, only {own}"

    def of_each_tower(self) -> set[str]:
        """The names of tensors and objects that were not the same on all towers."""
        names = {name.rpartition("@")[0] for name in self.tensors.names if "@" in name}
        return names.union(*self.manifest["own"])

    def close(self) -> None:
        self.tensors.close()


def _open(path: pathlib.Path, flags: int, kind: str, folder: int | None = None) -> int:
    """Open what must be a file or folder itself, not a link to one."""
    try:
        where = path if folder is None else path.name
        descriptor = os.open(where, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | flags, dir_fd=folder)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        reason = "it is a symbolic link" if path.is_symlink() else error.strerror
        raise CheckpointError(f"{path} cannot be opened: {reason}") from None
    if kind == "file" and not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is no ordinary file")
    return descriptor


def _checksum(descriptor: int) -> str:
    found, piece = hashlib.sha256(), bytearray(2**20)
    with open(descriptor, "rb", buffering=0, closefd=False) as file:
        while length := file.readinto(piece):
            found.update(memoryview(piece)[:length])
    return found.hexdigest()


class Folder:
    """Writes, lists and removes the checkpoints of one folder.

    Args:
        path: is made when it is missing.
        disk: how it is written.
    """

    def __init__(self, path: pathlib.Path, disk: Disk) -> None:
        self.path = path
        self.disk = disk

    def steps(self) -> list[int]:
        """The steps of which a checkpoint is here, in ascending order. Whether they are whole :class:`Opened` finds."""
        with contextlib.suppress(OSError):
            found = (step_of(entry.name) for entry in os.scandir(self.path) if entry.is_dir(follow_symlinks=False))
            return sorted(step for step in found if step is not None)
        return []

    def write(self, name: str, manifest: Manifest, pieces: Iterable[memoryview], keep: int) -> None:
        """Write a checkpoint, then remove the oldest steps beyond ``keep``.

        Checkpoints of later steps, which the run went back from, are put aside as ``replaced-…``: they are not its own.

        Raises:
            OSError, ValueError: something could not be written; the checkpoints that were here are here still.
        """
        place = self.path / name
        beside = self.path / f"{_SAVING}{name}-{os.getpid()}"
        try:
            self.disk.mkdir(beside)
            size, checksum = self.disk.write_file(beside / TENSORS, pieces)
            files = {TENSORS: {"bytes": size, "sha256": checksum}}
            text = manifests.dump({**manifest, "files": files}).encode()
            try:
                manifests.check_size(text)
            except Malformed as error:
                raise ValueError(f"no manifest can be written of it: {error}") from None
            self.disk.write_file(beside / NAME, [memoryview(text)])
            self.disk.sync_folder(beside)
            self._move_in(beside, place)
        except (OSError, ValueError):
            with contextlib.suppress(OSError):
                self.disk.remove(beside)
            raise
        self.disk.sync_folder(self.path)
        try:
            self._tidy(name, keep)
        except OSError as error:
            log.warning("%s is saved, but what it replaces could not be removed (%s)", place, error.strerror)

    def _move_in(self, beside: pathlib.Path, place: pathlib.Path) -> None:
        if not place.exists():
            self.disk.rename(beside, place)
            return
        before = self.path / f"{_REPLACING}{place.name}"
        self.disk.rename(place, before)
        try:
            self.disk.rename(beside, place)
        except OSError:
            self.disk.rename(before, place)
            raise

    def _tidy(self, name: str, keep: int) -> None:
        """Name the newest, and remove what is no longer kept."""
        if (before := self.path / f"{_REPLACING}{name}").exists():
            self.disk.remove(before)
        if (step := step_of(name)) is None:
            return
        self.disk.replace_file(self.path / LATEST, f"{name}\n")
        for later in self.steps():
            if later > step:
                self._put_aside(self.path / name_of(later))
        for old in self.steps()[:-keep]:
            self._put_away(self.path / name_of(old))

    def _put_aside(self, place: pathlib.Path) -> None:
        aside = self.path / f"replaced-{place.name}"
        if aside.exists():
            self._put_away(aside)
        self.disk.rename(place, aside)
        log.warning("%s is of a later step than this run has come to: it was renamed to %s", place, aside.name)

    def _put_away(self, place: pathlib.Path) -> None:
        """Remove a checkpoint, which is not there any more at once: never half of one."""
        away = self.path / f"{_REMOVING}{place.name}-{os.getpid()}"
        with contextlib.suppress(FileNotFoundError):
            self.disk.remove(away)
        self.disk.rename(place, away)
        self.disk.remove(away)

    def clean(self) -> None:
        """Remove what a process that was killed while it wrote or removed has left; put back what it was replacing."""
        with contextlib.suppress(OSError):
            for entry in self.path.iterdir():
                place = self.path / entry.name.removeprefix(_REPLACING)
                if entry.name.startswith(_REPLACING) and not place.exists():
                    self.disk.rename(entry, place)
                elif entry.name.startswith((_SAVING, _REMOVING, _REPLACING, PROBE)):
                    if entry.is_dir():
                        log.info("%s was left by a run that ended while it saved; it is removed", entry)
                    self.disk.remove(entry)
