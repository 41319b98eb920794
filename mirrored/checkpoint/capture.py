"""What all towers hold, brought together where it is written.

Mirrored parameters and the state of their optimizers are the same on all towers. All else may differ: BatchNorm's
running statistics, random numbers, whatever a script keeps. Towers compare what they hold by checksums, and what
differs is saved for each tower: the base is tower 0's, and tower 2's "model/bn.running_mean" is saved as
"model/bn.running_mean@2".
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from mirrored.checkpoint.codec import Encoder
from mirrored.checkpoint.tensors import Layout, as_it_was
from mirrored.checkpoint.tracked import Tracked, TrackedOptimizer
from towers.collectives.agreement import announce
from towers.collectives.communicator import Communicator, as_bytes


@dataclasses.dataclass(frozen=True)
class Captured:
    """The state of all towers.

    Attributes:
        objects: encoded state by name, as tower 0 has it.
        own: for every tower, those of them that are other ones there.
        tensors: by name; views of what is trained.
    """

    objects: dict[str, Any]
    own: list[dict[str, Any]]
    tensors: dict[str, Tensor]


def capture(comm: Communicator, tracked: Sequence[Tracked], step: int, writes: bool, complete: bool) -> Captured | None:
    """Bring together the state of all towers; all call it.

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
        for one in tracked if complete else [one for one in tracked if not isinstance(one, TrackedOptimizer)]:
            before = set(encoder.tensors)
            objects[one.name] = encoder.encode(one.state(), one.name, skip_code=one.skip_code)
            if comm.size > 1:
                checksums["objects"][one.name] = _checksum(json.dumps(objects[one.name]).encode())
                for name in encoder.tensors.keys() - before:
                    if not one.is_equal_everywhere(encoder.tensors[name]):
                        checksums["tensors"][name] = _checksum_of(encoder.tensors[name])
    except Exception as error:  # whatever a stranger's state_dict raises: all towers are told
        failed = error if isinstance(error, TypeError) else ValueError(f"{type(error).__name__}: {error}")
    said = [s.details for s in announce(comm, "saves a checkpoint", checksums, error=failed)]
    for tower, other in enumerate(said):
        if other["step"] != said[0]["step"]:
            raise ValueError(
                f"tower {tower} saves step {other['step']}, tower 0 step {said[0]['step']}: every tower must call "
                "checkpoints.step() after each of its steps"
            )
    different = {kind: _different([other[kind] for other in said]) for kind in ("objects", "tensors")}
    if not different["objects"] and not different["tensors"]:
        return Captured(objects, [{} for _ in said], encoder.tensors) if writes else None
    mine = _pack(
        {name: objects[name] for name in different["objects"] if name in objects},
        {name: encoder.tensors[name] for name in different["tensors"] if name in encoder.tensors},
    )
    given = [other.body for other in announce(comm, "saves what differs between towers", body=mine)]
    if not writes:
        return None
    return _join(objects, encoder.tensors, [_unpack(package) for package in given], said)


def _different(towers: Sequence[dict[str, str]]) -> list[str]:
    """The names under which not all towers that have one have the same."""
    names = {name: None for tower in towers for name in tower}
    return [
        name for name in names if len({tower[name] for tower in towers if name in tower}) > 1 or name not in towers[0]
    ]


def _join(
    objects: dict[str, Any],
    tensors: dict[str, Tensor],
    packages: Sequence[tuple[dict[str, Any], dict[str, Tensor]]],
    said: Sequence[dict[str, Any]],
) -> Captured:
    base, own = {**objects, **packages[0][0]}, [dict[str, Any]() for _ in packages]
    whole = {**tensors, **packages[0][1]}
    for tower, (their_objects, their_tensors) in enumerate(packages[1:], start=1):
        same = said[0]
        own[tower] = {n: v for n, v in their_objects.items() if same["objects"].get(n) != said[tower]["objects"][n]}
        for name, tensor in their_tensors.items():
            if same["tensors"].get(name) != said[tower]["tensors"][name]:
                whole[own_name(name, tower)] = tensor
    return Captured(base, own, whole)


def own_name(name: str, tower: int) -> str:
    """The name under which a tower's own value is saved, where it differs from tower 0's."""
    return f"{name}@{tower}"


def _checksum_of(tensor: Tensor) -> str:
    kind = f"{tensor.dtype} {tuple(tensor.shape)}"
    return kind + _checksum(as_bytes(tensor).cpu().numpy())


def _checksum(data: Any) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _pack(objects: dict[str, Any], tensors: dict[str, Tensor]) -> bytes:
    layout = Layout(tensors)
    header = json.dumps({"objects": objects, "unusual": layout.unusual}).encode()
    return b"".join([len(header).to_bytes(8, "little"), header, *layout.pieces()])


def _unpack(package: bytes) -> tuple[dict[str, Any], dict[str, Tensor]]:
    end = 8 + int.from_bytes(package[:8], "little")
    header = json.loads(package[8:end])
    with torch.device("cpu"):
        tensors = safetensors.torch.load(package[end:])
    return header["objects"], {n: as_it_was(t, header["unusual"].get(n, {})) for n, t in tensors.items()}
