"""One stored checkpoint: its name, its manifest, and a reader that checks it.

[Note: checksums find damage] The manifest (JSON) contains the SHA-256 of its own contents and of the file of tensors. A
thread computes the file's checksum in parallel with writing, and ``sha256sum`` can check it. The manifest's checksum
covers its parsed contents, not its bytes, whose comparison takes too long for the largest manifests. So a space that
has become a tab is not detected. Checksums detect damage, but they are not a signature. Anyone who can write into the
folder can forge a checkpoint with matching checksums, so everything in it is also treated as untrusted.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import re
import reprlib
import stat
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mirrored.checkpoint.codec import Malformed, decode
from mirrored.checkpoint.errors import CheckpointError, listed
from mirrored.checkpoint.tensors import TensorFile, is_shard_file
from towers.system.tensors import part_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

NAME = "manifest.json"
TENSORS = "tensors.safetensors"
LATEST = "latest"
FORMAT = "mirrored checkpoint"
VERSION = 1
LARGEST = 2**26
"""The maximum size in bytes of a manifest that is written or read."""
MOST = 2**22
"""The maximum number of values in a manifest, counted by commas and brackets. Each needs about 100 bytes of memory."""

Manifest = dict[str, Any]


def _is_number(value: Any, least: int) -> bool:
    return type(value) is int and least <= value < 2**63


def _are_dicts(values: Any) -> bool:
    return all(isinstance(value, dict) for value in values)


def _are_files(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and TENSORS in value
        and all(isinstance(file, dict) and _is_number(file.get("bytes"), 0) for file in value.values())
        and all(name == TENSORS or is_shard_file(name) for name in value)
    )


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "step": lambda value: _is_number(value, 0),
    "towers": lambda value: _is_number(value, 1),
    "virtual_towers": lambda value: value is None or _is_number(value, 1),
    "saved": lambda value: isinstance(value, str),
    "versions": lambda value: isinstance(value, dict),
    "objects": lambda value: isinstance(value, dict),
    "own": lambda value: isinstance(value, list) and _are_dicts(value),
    "tensors": lambda value: isinstance(value, dict) and _are_dicts(value.values()),
    "files": _are_files,
}
"""Functions that return whether the value of a field is valid, by field."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_STEP = re.compile(r"step-([0-9]{8,})")


def check_name(name: str) -> str:
    """Returns ``name`` if it cannot lead out of a folder.

    Raises:
        ValueError: ``name`` is not a valid name.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name == LATEST:
        raise ValueError(
            f"a checkpoint's name is {name!r}, but must consist of letters, digits, '.', '_' and '-', start with "
            f"a letter or a digit, and not be {LATEST!r}; it is the name of a folder, not a path"
        )
    return name


def is_step(name: str) -> bool:
    """Returns whether a name has the form of a step's checkpoint."""
    return _STEP.fullmatch(name) is not None


def step_of(name: str) -> int | None:
    """Returns the step in a checkpoint's name, or None for other names."""
    match = _STEP.fullmatch(name)
    return int(match[1]) if match and name == name_of(int(match[1])) else None


def name_of(step: int) -> str:
    """Returns the name of the checkpoint of a step."""
    return f"step-{step:08d}"


def own_name(name: str, tower: int) -> str:
    """Returns the name under which a tower's own value is saved, if the value differs from tower 0's."""
    return f"{name}@{tower}"


def dump(manifest: Manifest) -> bytes:
    """Returns the encoded manifest, with its own SHA-256 as the last field.

    Raises:
        ValueError: the manifest is larger than :func:`load` accepts, or contains a value that JSON does not support.
    """
    text = json.dumps({**manifest, "sha256": _checksum(manifest)}, indent=1, allow_nan=False).encode() + b"\n"
    _check_size(text)
    return text


def _check_size(text: bytes) -> None:
    """Rejects a manifest that would need a long time or much memory to read.

    Raises:
        Malformed: the manifest is too long, or contains too many values.
    """
    if len(text) > LARGEST:
        raise Malformed(f"the manifest is longer than {LARGEST} bytes; keep large lists as arrays or tensors")
    if sum(text.count(mark) for mark in (b",", b"[", b"{")) > MOST:
        raise Malformed(f"the manifest holds more than {MOST} values; keep large lists as arrays or tensors")


def load(text: bytes) -> Manifest:
    """Reads a manifest.

    Raises:
        Malformed: ``text`` is not a manifest, or is damaged.
    """
    _check_size(text)
    try:
        manifest = json.loads(text)
        if not isinstance(manifest, dict):
            raise Malformed("it is not a JSON object")
        stated = manifest.pop("sha256", None)
        is_whole = text.endswith(b"}\n") and _checksum(manifest) == stated
    except Malformed:
        raise
    except (ValueError, RecursionError) as error:
        raise Malformed(f"it is not valid JSON: {error}") from None
    if manifest.get("format") != FORMAT:
        raise Malformed(f"its format is {_short(manifest.get('format'))}, not {FORMAT!r}")
    if manifest.get("version") != VERSION:
        version = _short(manifest.get("version"))
        raise Malformed(f"its version is {version}; this version of mirrored reads version {VERSION}")
    if not is_whole:
        raise Malformed("its checksum does not fit: it is damaged")
    for field, fits in _FIELDS.items():
        if not fits(manifest.get(field)):
            raise Malformed(f"its field {field!r} is {_short(manifest.get(field))}")
    if len(manifest["own"]) != manifest["towers"]:
        raise Malformed(f"it is of {manifest['towers']} towers, but holds the own state of {len(manifest['own'])}")
    return manifest


def _checksum(manifest: Manifest) -> str:
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _short(value: Any) -> str:
    text = reprlib.repr(value)  # of limited length, for a value of any depth or size
    return text if len(text) < 60 else f"{text[:57]}..."


class StoredCheckpoint:
    """A checkpoint on the disk, open for reading. The caller must close it.

    Attributes:
        path: its folder.
        manifest: its manifest, checked by :func:`load`.
        tensors: its file of the tensors that are not sharded.
    """

    def __init__(self, path: pathlib.Path, *, check: bool = True, in_memory: bool = False) -> None:
        """Opens the checkpoint at ``path``.

        Args:
            check: whether to read the files of tensors completely and compare their checksums.
            in_memory: whether it is a snapshot, whose file of tensors is a link (:mod:`mirrored.checkpoint.memory`).

        Raises:
            CheckpointError: the checkpoint does not exist or is damaged. The message names the file.
        """
        self.path = path
        try:
            with contextlib.ExitStack() as stack:
                self._folder = _open(path, os.O_DIRECTORY)
                stack.callback(os.close, self._folder)
                self.manifest = self._read_manifest(self._folder)
                self._refuse_other_files(self._folder)
                for name in sorted(self.manifest["files"]):
                    self._open_file(name, check, in_memory)
                self._closing = stack.pop_all()
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from None

    def _read_manifest(self, folder: int) -> Manifest:
        path = self.path / NAME
        with open(_open(path, folder=folder), "rb") as file:
            text = file.read(LARGEST + 1)
        try:
            manifest = load(text)
            if is_step(self.path.name) and step_of(self.path.name) != manifest["step"]:
                raise Malformed(f"it is of step {manifest['step']}: the folder was renamed, or the manifest forged")
            return manifest
        except Malformed as error:
            raise CheckpointError(f"{path} cannot be used: {error}") from None

    def _refuse_other_files(self, folder: int) -> None:
        others = {name for name in os.listdir(folder) if not name.startswith(".")} - {NAME, *self.manifest["files"]}
        if others:
            raise CheckpointError(
                f"{self.path} holds {listed(sorted(others))}, which no checkpoint has: remove it, if it is yours"
            )

    def _open_file(self, name: str, check: bool, in_memory: bool) -> None:
        data = _open(self.path / name, folder=self._folder, follow=in_memory)
        try:
            self._check_file(name, data, check)
            if name == TENSORS:
                self.tensors = TensorFile(f"/proc/self/fd/{data}", self.manifest["tensors"])
        except Malformed as error:
            raise CheckpointError(f"{self.path / name} cannot be read: {error}") from None
        finally:
            os.close(data)

    def _check_file(self, name: str, descriptor: int, check: bool) -> None:
        path, stated = self.path / name, self.manifest["files"][name]
        size = os.fstat(descriptor).st_size
        if size != stated["bytes"]:
            raise CheckpointError(f"{path} is {size} bytes long, but was written with {stated['bytes']}: it is damaged")
        if check and _file_checksum(descriptor) != stated.get("sha256"):
            raise CheckpointError(f"{path} has another checksum than when it was written: it is damaged")

    def state(
        self, name: str, tower: int = 0, *, data: bool = True, places: Mapping[str, DTensor] | None = None
    ) -> Any:
        """Returns the state of an object on a tower. With ``data=False``, its tensors are "meta" tensors.

        Args:
            places: sharded tensors of this run by name. Tensors of these names get their layout; all others are whole.

        Raises:
            CheckpointError: the checkpoint does not contain the object, or its state is malformed.
        """
        objects, names = self.manifest["objects"], set(self.tensors.names)
        read = self.tensors.read if data else functools.cache(self.tensors.describe)
        if name not in objects:
            public = listed(each for each in objects if not each.startswith("mirrored."))
            raise CheckpointError(f"{self.path}: it holds no {name!r}, only {public}")

        sharded: dict[str, Tensor] = {}

        def tensor(path: str, layout: Tensor | None = None) -> Tensor:
            own, place = own_name(path, tower), (places or {}).get(path)
            if layout is None:
                value = read(own if own in names else path)
                return value if place is None or not data else part_of(value, place)
            if not data:
                return layout
            if place is not None and place.shape == layout.shape:
                sharded[path] = torch.empty_like(place, dtype=layout.dtype)
            else:
                sharded[path] = torch.empty_like(layout, device="cpu")
            return sharded[path]

        try:
            state = decode(self.manifest["own"][tower].get(name, objects[name]), tensor)
            if sharded:
                from mirrored.checkpoint.shards import read_shards  # it is slow to import

                read_shards(f"/proc/self/fd/{self._folder}", sharded)
            return state
        except (Malformed, RecursionError) as error:
            raise CheckpointError(f"{self.path}: {name} cannot be read: {error}") from None

    def of_each_tower(self) -> set[str]:
        """Returns the names of tensors and objects that differed between towers."""
        names = {name.rpartition("@")[0] for name in self.tensors.names if "@" in name}
        return names.union(*self.manifest["own"])

    def close(self) -> None:
        self.tensors.close()
        self._closing.close()


def _open(path: pathlib.Path, flags: int = 0, folder: int | None = None, follow: bool = False) -> int:
    """Opens an ordinary file, or a folder with ``O_DIRECTORY``. A link is opened only with ``follow=True``."""
    try:
        name = path if folder is None else path.name
        flags |= os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
        descriptor = os.open(name, flags, dir_fd=folder)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        reason = "it is a symbolic link" if path.is_symlink() else error.strerror
        raise CheckpointError(f"{path} cannot be opened: {reason}") from None
    if not flags & os.O_DIRECTORY and not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not an ordinary file")
    return descriptor


def _file_checksum(descriptor: int) -> str:
    checksum, buffer = hashlib.sha256(), bytearray(2**20)
    with open(descriptor, "rb", buffering=0, closefd=False) as file:
        while length := file.readinto(buffer):
            checksum.update(memoryview(buffer)[:length])
    return checksum.hexdigest()
