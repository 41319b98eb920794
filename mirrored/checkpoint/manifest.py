"""The manifest: what a checkpoint holds, as JSON that says itself whether it is whole."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from mirrored.checkpoint.codec import Malformed

NAME = "manifest.json"
TENSORS = "tensors.safetensors"
FORMAT = "mirrored checkpoint"
VERSION = 1
LARGEST = 2**28  # bytes that are read of a manifest

Manifest = dict[str, Any]

_FIELDS: dict[str, type | tuple[type, ...]] = {
    "format": str,
    "version": int,
    "step": int,
    "towers": int,
    "virtual_towers": (int, type(None)),
    "saved": str,
    "versions": dict,
    "objects": dict,
    "own": list,
    "tensors": dict,
    "files": dict,
}


def dump(manifest: Manifest) -> str:
    """The text of a manifest, with its own SHA-256 as last field."""
    return json.dumps({**manifest, "sha256": _checksum(manifest)}, indent=1, allow_nan=False) + "\n"


def load(text: bytes) -> Manifest:
    """Read a manifest.

    Raises:
        Malformed: it is none, or not whole.
    """
    try:
        found = json.loads(text)
        if not isinstance(found, dict):
            raise Malformed("it is no JSON object")
        found.pop("sha256", None)
        as_written = dump(found).encode() == text  # its checksum included
    except Malformed:
        raise
    except (ValueError, RecursionError) as error:
        raise Malformed(f"it is no JSON: {error}") from None
    if found.get("format") != FORMAT:
        raise Malformed(f"its format is {found.get('format')!r}, not {FORMAT!r}")
    if found.get("version") != VERSION:
        raise Malformed(f"its version is {found.get('version')!r}; this version of mirrored reads version {VERSION}")
    if not as_written:
        raise Malformed("its checksum does not fit: it is damaged")
    for field, kind in _FIELDS.items():
        if not isinstance(found.get(field), kind) or isinstance(found[field], bool):
            raise Malformed(f"its field {field!r} is {_short(found.get(field))}")
    entry = found["files"].get(TENSORS)
    if not isinstance(entry, dict) or not isinstance(entry.get("bytes"), int) or set(found["files"]) != {TENSORS}:
        raise Malformed(f"its field 'files' is {_short(found['files'])}")
    if not all(isinstance(value, dict) for value in (*found["own"], *found["tensors"].values())):
        raise Malformed("its fields 'own' and 'tensors' hold something else than objects")
    return found


def _checksum(manifest: Manifest) -> str:
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else f"{text[:57]}..."
