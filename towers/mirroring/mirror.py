"""Makes the towers mirror images: the same parameters and buffers, by name, shape, dtype, order and value."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from towers.collectives.agreement import announce, digest_of
from towers.collectives.communicator import Communicator, as_bytes
from towers.errors import MirrorError
from towers.system.tensors import Named

_CHUNK_BYTES = 32 * 2**20


def check_equal(comm: Communicator, tensors: Sequence[Named]) -> None:
    """Checks that all towers hold the same tensors in the same order. If they do, it takes one small collective.

    Raises:
        MirrorError: on all towers with the same message, with the name of the first tensor that differs.
    """
    description = [tensor.describe() for tensor in tensors]
    digests = announce(comm, "the first run() of a model", digest_of(description))
    if all(digest == digests[0] for digest in digests):
        return
    lists = comm.all_gather_json(description)
    other = next(tower for tower, digest in enumerate(digests) if digest != digests[0])
    raise MirrorError(_difference(lists[0], lists[other], other))


def _difference(first: list[list[object]], second: list[list[object]], tower: int) -> str:
    """Returns the first way in which tower ``tower``'s tensors differ from tower 0's, as a sentence."""
    advice = "; build the same model on all towers, in the same order"
    for row, other in zip(first, second, strict=False):
        if row == other:
            continue
        name, shape, dtype, kind, trainable, layout = row
        if name != other[0]:
            names = {str(row[0]) for row in first}, {str(row[0]) for row in second}
            if names[0] == names[1]:
                return f"the order of parameters differs: {name} on tower 0 is {other[0]} on tower {tower}{advice}"
            only = sorted(names[0] - names[1]) or sorted(names[1] - names[0])
            has = 0 if names[0] - names[1] else tower
            hasnt = tower if has == 0 else 0
            return f"{kind} {only[0]} is on tower {has} but not on tower {hasnt}{advice}"
        differences = [("shape", shape, other[1]), ("dtype", dtype, other[2]), ("kind", kind, other[3])]
        for what, a, b in [*differences, ("layout", layout, other[5])]:
            if a != b:
                return f"{kind} {name} has {what} {_show(a)} on tower 0, but {_show(b)} on tower {tower}{advice}"
        return (
            f"parameter {name} is {'trainable' if trainable else 'frozen'} on tower 0, but not on tower {tower}; "
            "freeze the same parameters on all towers"
        )
    longer, missing = (first, tower) if len(first) > len(second) else (second, 0)
    row = longer[min(len(first), len(second))]
    counts = f"{len(first)} tensors on tower 0, {len(second)} on tower {tower}"
    return f"{row[3]} {row[0]} is missing on tower {missing}: {counts}{advice}"


def _show(value: object) -> str:
    return str(tuple(value)) if isinstance(value, list) else str(value)


@torch.no_grad()
def broadcast(comm: Communicator, tensors: Sequence[Tensor]) -> None:
    """Overwrites every tower's ``tensors`` with tower 0's, in place, in flat pieces of one device."""
    places = [_once(tensor) for tensor in tensors]
    for device in dict.fromkeys(place.device for place in places):
        here = [place for place in places if place.device == device]
        ends = itertools.accumulate(place.nbytes for place in here)
        for _, pairs in itertools.groupby(zip(here, ends, strict=True), lambda pair: pair[1] // _CHUNK_BYTES):
            _broadcast_chunk(comm, [place for place, _ in pairs])


def _once(tensor: Tensor) -> Tensor:
    """Returns the same memory without the repetitions of ``expand``, which cannot be written to."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _broadcast_chunk(comm: Communicator, chunk: Sequence[Tensor]) -> None:
    # As bytes, every dtype can be sent, even if a backend has no arithmetic for it.
    flat = torch.cat([as_bytes(tensor) for tensor in chunk])
    comm.broadcast(flat)
    pieces = flat.split([tensor.nbytes for tensor in chunk])
    for tensor, piece in zip(chunk, pieces, strict=True):
        tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))
