"""The manifest: what a checkpoint holds, as JSON that says itself whether it is whole."""

from __future__ import annotations

import hashlib
import json
import reprlib
from typing import Any

from mirrored.checkpoint.codec import Malformed

NAME = "manifest.json"
TENSORS = "tensors.safetensors"
FORMAT = "mirrored checkpoint"
VERSION = 1
LARGEST = 2**26
"""Bytes of a manifest that is written or read."""
MOST = 2**22
"""Values in a manifest that is written or read, as commas and brackets count them. Each takes some 100 bytes."""

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


def check_size(text: bytes) -> None:
    """See that a manifest is none that takes long, or much memory, to read.

    Raises:
        Malformed: it is.
    """
    if len(text) > LARGEST:
        raise Malformed(f"it is longer than {LARGEST} bytes; keep large lists as arrays or tensors")
    if sum(text.count(mark) for mark in (b",", b"[", b"{")) > MOST:
        raise Malformed(f"it holds more than {MOST} values; keep large lists as arrays or tensors")


def load(text: bytes) -> Manifest:
    """Read a manifest.

    Raises:
        Malformed: it is none, or not whole.
    """
    check_size(text)
    try:
        found = json.loads(text)
        if not isinstance(found, dict):
            raise Malformed("it is no JSON object")
        stated = found.pop("sha256", None)
        is_whole = text.endswith(b"}\n") and _checksum(found) == stated
    except Malformed:
        raise
    except (ValueError, RecursionError) as error:
        raise Malformed(f"it is no JSON: {error}") from None
    if found.get("format") != FORMAT:
        raise Malformed(f"its format is {_short(found.get('format'))}, not {FORMAT!r}")
    if found.get("version") != VERSION:
        version = _short(found.get("version"))
        raise Malformed(f"its version is {version}; this version of mirrored reads version {VERSION}")
    if not is_whole:
        raise Malformed("its checksum does not fit: it is damaged")
    for field, kind in _FIELDS.items():
        if not isinstance(found.get(field), kind) or isinstance(found[field], bool):
            raise Malformed(f"its field {field!r} is {_short(found.get(field))}")
    for field, least in (("step", 0), ("towers", 1), ("virtual_towers", 1)):
        if found[field] is not None and not least <= found[field] < 2**63:
            raise Malformed(f"its field {field!r} is {_short(found[field])}")
    entry = found["files"].get(TENSORS)
    if not isinstance(entry, dict) or not isinstance(entry.get("bytes"), int) or set(found["files"]) != {TENSORS}:
        raise Malformed(f"its field 'files' is {_short(found['files'])}")
    if not all(isinstance(value, dict) for value in (*found["own"], *found["tensors"].values())):
        raise Malformed("its fields 'own' and 'tensors' hold something else than objects")
    if len(found["own"]) != found["towers"]:
        raise Malformed(f"it is of {found['towers']} towers, and holds what {len(found['own'])} have of their own")
    return found


def _checksum(manifest: Manifest) -> str:
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _short(value: Any) -> str:
    text = reprlib.repr(value)  # however deep or large it is
    return text if len(text) < 60 else f"{text[:57]}..."
