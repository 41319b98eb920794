"""A checkpoint as a table that a person reads."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator
from typing import Any

from mirrored.checkpoint.codec import Malformed, decode
from mirrored.checkpoint.disk import Disk
from mirrored.checkpoint.errors import CheckpointError
from mirrored.checkpoint.folder import LATEST, Folder, Opened, name_of
from mirrored.checkpoint.manifest import NAME, TENSORS


def inspect(path: str | os.PathLike[str]) -> str:
    """What a checkpoint holds, or the newest of a folder of them; reads all of it and compares its checksums.

    Raises:
        CheckpointError: there is none, or it is not whole.
    """
    opened = Opened(_find(pathlib.Path(path)))
    try:
        return "\n".join(_lines(opened))
    except (Malformed, RecursionError) as error:
        raise CheckpointError(f"{opened.path / NAME} cannot be used: {error}") from None
    finally:
        opened.close()


def _find(path: pathlib.Path) -> pathlib.Path:
    if path.name in (NAME, TENSORS):
        return path.parent
    if path.name == LATEST or ((path / LATEST).exists() and not (path / NAME).exists()):
        folder = path.parent if path.name == LATEST else path
        if steps := Folder(folder, Disk()).steps():
            return folder / name_of(steps[-1])
    return path


def _lines(opened: Opened) -> Iterator[str]:
    manifest = opened.manifest
    size = manifest["files"][TENSORS]["bytes"]
    virtual = f" ({manifest['virtual_towers']} virtual)" if manifest["virtual_towers"] else ""
    versions = ", ".join(f"{name} {version}" for name, version in manifest["versions"].items())
    yield f"{opened.path}: step {manifest['step']}, saved {manifest['saved']} by {manifest['towers']} towers{virtual}"
    yield f"{size:,} bytes of tensors, SHA-256 {manifest['files'][TENSORS]['sha256']}, whole; {versions}"
    yield ""
    yield f"{'name':<44} {'dtype':<10} {'shape':<18} {'bytes':>12}"
    for name, tree in manifest["objects"].items():
        for path, kind, shape, count in _rows(name, decode(tree, opened.tensors.describe)):
            yield f"{path:<44} {kind:<10} {shape:<18} {count:>12}".rstrip()
    if own := sorted(opened.of_each_tower()):
        yield ""
        yield f"of its own on each tower: {', '.join(own)}"


def _rows(path: str, value: Any) -> Iterator[tuple[str, str, str, str]]:
    if hasattr(value, "nbytes") and hasattr(value, "shape"):
        yield path, str(value.dtype).removeprefix("torch."), str(tuple(value.shape)), f"{value.nbytes:,}"
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _rows(f"{path}/{key}", part)
    elif isinstance(value, (list, tuple)) and any(
        isinstance(part, (dict, list, tuple)) or hasattr(part, "nbytes") for part in value
    ):
        for number, part in enumerate(value):
            yield from _rows(f"{path}/{number}", part)
    else:
        text = repr(value)
        yield path, type(value).__name__, text if len(text) <= 60 else f"{text[:57]}...", ""
