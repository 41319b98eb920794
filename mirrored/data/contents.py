"""Descriptions of examples, with which towers detect that they load different data.

[Note: contents are compared] Every tower takes its share of the same data. Random numbers that were drawn before the
strategy existed, a generator without a seed, or the order of a set give each tower other data, without an error. So
towers describe a few examples at the start of an epoch, and each batch of a stream. Numbers are compared with a
tolerance, because processors may round differently.

[Note: augmentation is not compared] A map-style dataset may augment examples with a generator that the strategy does
not seed; each example is used once, so this is right. Its examples are therefore loaded twice, and only the leaves that
are equal both times, bit for bit, are compared. A random flip is often equal twice. Before a difference is an error,
the examples are therefore loaded 32 times, in which a leaf that varies has almost certainly varied.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from mirrored.shares import is_array
from towers.collectives.agreement import announce
from towers.collectives.communicator import Communicator
from towers.errors import DisagreementError
from towers.system import tree as trees

_RELATIVE, _ABSOLUTE = 1e-3, 1e-6  # tolerances
_NUMBERS = 64  # of an array that are compared
_LEAVES = 256  # of an example that are compared
_DIGESTED = 1 << 20  # bytes of an array of whole numbers that is compared completely

LOADS, LOADS_BEFORE_AN_ERROR = 2, 32
"""The number of times that an example is loaded to describe it, see [Note: augmentation is not compared]."""

Contents = list[Any]
"""The description of an example: a JSON value for each leaf. None is not compared."""


def describe(example: Any) -> Contents:
    """Returns the description of an example, a batch, or the arrays of a dataset."""
    leaves = list(trees.leaves(example))
    count = len(leaves)
    if count > _LEAVES:
        leaves = [leaves[count * i // _LEAVES] for i in range(_LEAVES)]
    return [count, *map(_described, leaves)]


def _described(leaf: Any) -> Any:
    if isinstance(leaf, np.generic):
        leaf = leaf.item()
    if isinstance(leaf, (str, bytes)):
        return _digest(leaf.encode() if isinstance(leaf, str) else leaf)
    if isinstance(leaf, (bool, int, float)):
        return leaf
    if hasattr(leaf, "__array_interface__") and not isinstance(leaf, np.ndarray):
        leaf = np.asarray(leaf)  # an image
    if not is_array(leaf):
        return type(leaf).__name__
    return [str(leaf.dtype).removeprefix("torch."), list(leaf.shape), _numbers(leaf)]


def _numbers(array: Any) -> Any:
    """Returns numbers at even distances in an array, or the digest of a small array of whole numbers."""
    is_tensor = isinstance(array, torch.Tensor)
    if is_tensor and (array.layout != torch.strided or array.is_quantized):
        return None
    flat = array.detach().reshape(-1) if is_tensor else np.reshape(array, -1)
    count = len(flat)
    places = [count * i // _NUMBERS for i in range(_NUMBERS)] if count > _NUMBERS else list(range(count))

    def on_host(part: Any) -> Any:
        if not is_tensor:
            return part
        part = part.cpu()
        return (part.double() if part.is_floating_point() else part).numpy()

    chosen = on_host(flat[places])
    if chosen.dtype.kind in "biu":
        return _digest(on_host(flat).tobytes()) if array.nbytes <= _DIGESTED else chosen.tolist()
    if chosen.dtype.kind == "c":
        return [part for number in chosen.tolist() for part in (number.real, number.imag)]
    return chosen.astype(float).tolist() if chosen.dtype.kind == "f" else _digest(repr(chosen.tolist()).encode())


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def stable(descriptions: Sequence[Contents]) -> Contents:
    """Returns the leaves that are equal in all descriptions of an example; see [Note: augmentation is not compared]."""
    first = descriptions[0]
    if any(len(other) != len(first) for other in descriptions):
        return []
    return [leaves[0] if len(set(map(repr, leaves))) == 1 else None for leaves in zip(*descriptions, strict=True)]


def _same(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return True
    if isinstance(one, float) or isinstance(other, float):
        if not (isinstance(one, (int, float)) and isinstance(other, (int, float))):
            return False
        near = math.isclose(one, other, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
        return near or (math.isnan(one) and math.isnan(other))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def gather(comm: Communicator, data: str, described: Sequence[Contents]) -> list[Any]:
    """Returns all towers' descriptions of the same examples.

    Args:
        data: the name of the data in messages, such as "epoch 0 of a distributed dataset".
        described: this tower's, in order.
    """
    return announce(comm, f"the examples of {data}", list(described))


def tower_that_differs(towers: Sequence[Any]) -> int | None:
    """Returns the first tower whose descriptions are not those of tower 0, or None if all are equal."""
    first = towers[0]  # mostly, all are equal to the bit, which == finds sooner
    return next((tower for tower, other in enumerate(towers) if other != first and not _same(other, first)), None)


def compare(towers: Sequence[Any], data: str) -> None:
    """Checks that all towers have described the same examples.

    Raises:
        DisagreementError: they differ.
    """
    if (tower := tower_that_differs(towers)) is not None:
        raise DisagreementError(
            f"tower {tower} and tower 0 load different examples in {data}, although each takes its share of the "
            "same data, so some examples would be used twice and others not at all. Likely causes: data that the "
            "script has already split by tower (distribute_dataset splits them); random numbers "
            "that were drawn before the strategy was created; a generator without a fixed seed "
            "(numpy.random.default_rng(), torch.Generator); the order of a set; files or numbers that each tower "
            "chooses or creates by itself. Create the strategy first, draw from the global generators of torch, "
            "NumPy or Python, which are equal on all towers, and give other generators a fixed seed. For data that "
            "differ on purpose, use distribute_datasets_from_function"
        )
