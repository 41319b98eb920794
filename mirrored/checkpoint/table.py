"""``mirrored checkpoint inspect``: prints a checkpoint as a table."""

from __future__ import annotations

import contextlib
import itertools
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

from mirrored.checkpoint.errors import listed
from mirrored.checkpoint.folder import find_checkpoint
from mirrored.checkpoint.manifest import TENSORS, StoredCheckpoint
from towers.system.text import printable

_MOST_ROWS = 100_000
_LONGEST = 200  # characters per path


def inspect(path: str | os.PathLike[str]) -> str:
    """Returns a table of a checkpoint, or of the newest in a folder. It reads the whole file and compares its checksum.

    Raises:
        CheckpointError: there is no checkpoint, or it is damaged.
    """
    with contextlib.closing(StoredCheckpoint(find_checkpoint(pathlib.Path(path)))) as stored:
        return "\n".join(_lines(stored))


def _lines(stored: StoredCheckpoint) -> Iterator[str]:
    manifest = stored.manifest
    file = manifest["files"][TENSORS]
    virtual = f" ({manifest['virtual_towers']} virtual)" if manifest["virtual_towers"] else ""
    versions = listed(f"{name} {version}" for name, version in manifest["versions"].items())
    saved = f"step {manifest['step']}, saved {printable(manifest['saved'], 40)} by {manifest['towers']} towers{virtual}"
    yield f"{printable(str(stored.path))}: {saved}"
    yield f"{file['bytes']:,} bytes of tensors, SHA-256 {printable(file['sha256'], 64)}, whole; {versions}"
    yield ""
    yield f"{'name':<44} {'dtype':<10} {'shape':<18} {'bytes':>12}"
    rows = _rows((name, stored.state(name, data=False)) for name in manifest["objects"])
    for path, kind, shape, count in itertools.islice(rows, _MOST_ROWS):
        yield f"{path:<44} {kind:<10} {shape:<18} {count:>12}".rstrip()
    if more := sum(1 for _ in rows):
        yield f"and {more:,} more"
    if different := sorted(stored.of_each_tower()):
        yield ""
        yield f"separate on each tower: {listed(different)}"


def _rows(objects: Iterable[tuple[object, Any]]) -> Iterator[tuple[str, str, str, str]]:
    """Yields the path, type, shape or value, and bytes of every entry of named objects, depth first."""
    stack = [("", iter(objects))]
    while stack:
        above, entries = stack[-1]
        try:
            key, value = next(entries)
        except StopIteration:
            stack.pop()
            continue
        path = (above + printable(str(key), _LONGEST))[:_LONGEST]
        if hasattr(value, "nbytes") and hasattr(value, "shape"):
            yield path, str(value.dtype).removeprefix("torch."), _brief(tuple(value.shape)), f"{value.nbytes:,}"
        elif isinstance(value, dict):
            stack.append((f"{path}/", iter(value.items())))
        elif isinstance(value, (list, tuple)) and any(
            isinstance(entry, (dict, list, tuple)) or hasattr(entry, "nbytes") for entry in value
        ):
            stack.append((f"{path}/", iter(enumerate(value))))
        else:
            yield path, type(value).__name__, _brief(value), ""


def _brief(value: Any) -> str:
    """Returns a value in at most 60 printable characters."""
    text = repr(value[:61] if isinstance(value, (str, bytes, list, tuple)) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."
