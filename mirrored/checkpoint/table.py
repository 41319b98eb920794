"""A checkpoint as a table that a person reads."""

from __future__ import annotations

import functools
import itertools
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

from mirrored.checkpoint.codec import Malformed, decode
from mirrored.checkpoint.disk import Disk
from mirrored.checkpoint.errors import CheckpointError, some_of
from mirrored.checkpoint.folder import LATEST, Folder, Opened, name_of
from mirrored.checkpoint.manifest import NAME, TENSORS
from towers.system.text import printable

_MOST_ROWS = 100_000
_LONGEST = 200  # letters of a path


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
    file = manifest["files"][TENSORS]
    virtual = f" ({manifest['virtual_towers']} virtual)" if manifest["virtual_towers"] else ""
    versions = some_of(f"{name} {version}" for name, version in manifest["versions"].items())
    saved = f"step {manifest['step']}, saved {printable(manifest['saved'], 40)} by {manifest['towers']} towers{virtual}"
    yield f"{printable(str(opened.path))}: {saved}"
    yield f"{file['bytes']:,} bytes of tensors, SHA-256 {printable(file['sha256'], 64)}, whole; {versions}"
    yield ""
    yield f"{'name':<44} {'dtype':<10} {'shape':<18} {'bytes':>12}"
    describe = functools.cache(opened.tensors.describe)
    rows = _rows((name, decode(tree, describe)) for name, tree in manifest["objects"].items())
    for path, kind, shape, count in itertools.islice(rows, _MOST_ROWS):
        yield f"{path:<44} {kind:<10} {shape:<18} {count:>12}".rstrip()
    if more := sum(1 for _ in rows):
        yield f"and {more:,} more"
    if own := sorted(opened.of_each_tower()):
        yield ""
        yield f"of its own on each tower: {some_of(own)}"


def _rows(objects: Iterable[tuple[object, Any]]) -> Iterator[tuple[str, str, str, str]]:
    """Path, kind, shape or value, and bytes of all that lies in objects with names, depth first."""
    inside = [("", iter(objects))]
    while inside:
        above, parts = inside[-1]
        try:
            key, value = next(parts)
        except StopIteration:
            inside.pop()
            continue
        path = (above + printable(str(key), _LONGEST))[:_LONGEST]
        if hasattr(value, "nbytes") and hasattr(value, "shape"):
            yield path, str(value.dtype).removeprefix("torch."), _brief(tuple(value.shape)), f"{value.nbytes:,}"
        elif isinstance(value, dict):
            inside.append((f"{path}/", iter(value.items())))
        elif isinstance(value, (list, tuple)) and any(
            isinstance(part, (dict, list, tuple)) or hasattr(part, "nbytes") for part in value
        ):
            inside.append((f"{path}/", iter(enumerate(value))))
        else:
            yield path, type(value).__name__, _brief(value), ""


def _brief(value: Any) -> str:
    """A value in at most 60 letters, all of which can be printed."""
    sliced = value[:61] if isinstance(value, (str, bytes, list, tuple)) else value
    text = repr(sliced)
    return text if len(text) <= 60 and (sliced is value or len(value) <= 61) else f"{text[:57]}..."
