"""Makes towers mirror images, with the same parameters and buffers, and finds values that are not the same on all.

A fingerprint depends on the bits, not on the values: 0.0 and -0.0 differ, and so do two NaNs with different payloads. A
large tensor is first folded, as a matrix of words, into the sums of its columns and of its rows. One changed word
changes one column; two swapped words change two columns or two rows. Only changes at the four corners of a rectangle
can cancel. The result is mixed with its position, so that the order counts, and added up. Different words have equal
fingerprints with a probability of about 2^-64.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from towers.collectives.agreement import announce
from towers.collectives.communicator import Communicator, as_bytes
from towers.errors import MirrorError
from towers.system.messages import digest_of, name_towers
from towers.system.tensors import HostCopy, Named, on_device

COLUMNS = 1021  # a prime, so that no row of a weight matrix falls onto the columns of the previous row
_WORDS = {1: torch.uint8, 4: torch.int32, 8: torch.int64}
# as the int64 numbers with these bits
_GOLDEN, _FIRST, _SECOND = (n - (1 << 64) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))

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


def fingerprints(tensors: Sequence[Tensor]) -> Tensor:
    """Returns one fingerprint for each tensor. It depends on the bits and their order, not on strides or other tensors.

    Args:
        tensors: strided, on one device, of any dtype and shape.

    Returns:
        int64, shape ``(len(tensors),)``, on the tensors' device. The host does not wait for a GPU.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.int64, device="cpu")
    device = tensors[0].device
    by_size: dict[int, list[_Piece]] = {size: [] for size in _WORDS}
    for owner, tensor in enumerate(tensors):
        for piece in _pieces(owner, tensor):
            by_size[piece.words.element_size()].append(piece)
    pieces = [piece for group in by_size.values() for piece in group]
    if not pieces:
        return torch.zeros(len(tensors), dtype=torch.int64, device=device)
    words = torch.cat([torch.cat([p.words for p in group]).long() for group in by_size.values() if group])
    lengths = [piece.words.numel() for piece in pieces]
    ends = list(itertools.accumulate(lengths))
    offsets = [piece.offset - end + length for piece, end, length in zip(pieces, ends, lengths, strict=True)]
    rows = [[piece.owner for piece in pieces], lengths, ends, offsets]
    plan = on_device(torch.tensor(rows, dtype=torch.int64, device="cpu"), device)
    positions = torch.repeat_interleave(plan[3], plan[1], output_size=ends[-1])
    positions += torch.arange(ends[-1], device=device)
    sums = _mix(words.add_(positions.mul_(_GOLDEN))).cumsum(0)[plan[2] - 1]
    sums[1:] -= sums[:-1].clone()
    return torch.zeros(len(tensors), dtype=torch.int64, device=device).index_add_(0, plan[0], sums)


class _Piece(NamedTuple):
    """Flat words of tensor number ``owner``, the first of which is at position ``offset`` in it."""

    owner: int
    words: Tensor
    offset: int


def _pieces(owner: int, tensor: Tensor) -> list[_Piece]:
    """Returns the parts of a tensor to mix: all of a small tensor; the folded part and the rest of a large one."""
    memory = as_bytes(tensor)
    if memory.storage_offset() % 8:
        memory = memory.clone()
    width = 8 if memory.numel() % 8 == 0 else 4 if memory.numel() % 4 == 0 else 1
    rows = memory.numel() // (8 * COLUMNS)
    if rows < 2:
        return [_Piece(owner, memory.view(_WORDS[width]), 0)] if memory.numel() else []
    folded = 8 * COLUMNS * rows
    matrix = memory[:folded].view(torch.int64).view(rows, COLUMNS)
    pieces = [_Piece(owner, matrix.sum(0), 1 << 40), _Piece(owner, matrix.sum(1), 1 << 41)]
    if folded < memory.numel():
        pieces.append(_Piece(owner, memory[folded:].view(_WORDS[width]), 0))
    return pieces


def _mix(words: Tensor) -> Tensor:
    """Mixes each int64 in place, with SplitMix64's finalizer (Steele, Lea, Flood, 2014), which is one to one."""
    words.bitwise_xor_(_shifted(words, 30)).mul_(_FIRST)
    words.bitwise_xor_(_shifted(words, 27)).mul_(_SECOND)
    return words.bitwise_xor_(_shifted(words, 31))


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Returns a shift to the right that fills with zeros; torch's fills with the sign."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1)


@dataclass(frozen=True)
class Held:
    """A value that a tower holds.

    Attributes:
        name: its unique name, also in messages.
        kind: a word for its kind.
        value: a tensor, or a plain value, whose ``repr`` is compared.
    """

    name: str
    kind: str
    value: object


@dataclass(frozen=True)
class Difference:
    """A value that is not the same on all towers.

    Attributes:
        name: its name (:class:`Held`).
        kinds: its kinds on any tower.
        groups: groups of towers with the same value. The largest group is first; of equally large groups, the one with
            the first tower.
        values: a plain value, by tower; None for tensors.
    """

    name: str
    kinds: list[str]
    groups: list[list[int]]
    values: list[str] | None = None


class Comparison:
    """A comparison that was started. A GPU may still be computing it.

    Args:
        held: the compared values.
        prints: every tower's fingerprints of them, shape ``(towers, len(held))``.
        differences: differences that are already known.
    """

    def __init__(self, held: Sequence[Held], prints: HostCopy | None, differences: Sequence[Difference] = ()) -> None:
        self._labels = [(one.name, one.kind) for one in held]
        self._prints = prints
        self._differences = list(differences)

    def differences(self) -> list[Difference]:
        """Returns the differences, in order, the same on all towers. It waits for a GPU that is still computing."""
        if self._prints is not None:
            rows, self._prints = self._prints.get(), None
            for number in (rows != rows[0]).any(0).nonzero().flatten().tolist():
                name, kind = self._labels[number]
                self._differences.append(Difference(name, [kind], groups_of(rows[:, number].tolist())))
        return self._differences


def start_comparison(comm: Communicator, call: str, held: Sequence[Held]) -> Comparison:
    """Compares this tower's values with those of the others. All towers call it.

    Fingerprints of tensors on the communicator's device are made and gathered there, which on a GPU needs no wait.
    Values that some towers do not hold at all are not compared, because garbage is collected earlier on some towers.

    Raises:
        DisagreementError: on all towers, if some make another call.
    """
    near = [one for one in held if isinstance(one.value, Tensor) and one.value.device == comm.device]
    far = [one for one in held if not isinstance(one.value, Tensor) or one.value.device != comm.device]
    prints = fingerprints([one.value for one in near if isinstance(one.value, Tensor)])
    texts = _texts(far)
    digest = digest_of([[(one.name, one.kind) for one in held], texts])
    digests = announce(comm, call, digest)
    if all(other == digest for other in digests):
        if not near:
            return Comparison([], None)
        pending, rows = comm.start_all_gather(prints)
        pending.wait()
        return Comparison(near, HostCopy(rows))
    texts.update(zip((one.name for one in near), map(str, prints.tolist()), strict=True))
    towers = comm.all_gather_json({one.name: [one.kind, texts[one.name]] for one in held})
    return Comparison([], None, differences(towers, held))


Description = dict[str, list[str]]
"""By name of a tower's value: its kind, and a text that is equal for equal values."""


def describe(held: Sequence[Held]) -> Description:
    """Describes a tower's values for :func:`differences`. It waits for a GPU."""
    texts = _texts(held)
    return {one.name: [one.kind, texts[one.name]] for one in held}


def _texts(held: Sequence[Held]) -> dict[str, str]:
    """Returns, by name, texts of plain values and of tensors' fingerprints. It waits for the latter."""
    texts = {one.name: repr(one.value) for one in held if not isinstance(one.value, Tensor)}
    by_device: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for one in held:
        if isinstance(one.value, Tensor):
            by_device.setdefault(one.value.device, []).append((one.name, one.value))
    for tensors in by_device.values():
        prints = fingerprints([tensor for _, tensor in tensors]).tolist()
        texts.update(zip((name for name, _ in tensors), map(str, prints), strict=True))
    return texts


def differences(towers: Sequence[Description], held: Sequence[Held]) -> list[Difference]:
    """Returns the differences between the towers' values, for values that all towers hold.

    Args:
        held: this tower's values.
    """
    plain = {one.name for one in held if not isinstance(one.value, Tensor)}
    different = []
    for name in towers[0]:
        if not all(name in listing for listing in towers):
            continue
        kinds, values = ([listing[name][i] for listing in towers] for i in (0, 1))
        if any(value != values[0] for value in values):
            different.append(Difference(name, sorted(set(kinds)), groups_of(values), values if name in plain else None))
    return different


def groups_of(values: Sequence[object]) -> list[list[int]]:
    """Returns groups of towers with the same value, the largest group first."""
    groups: dict[object, list[int]] = {}
    for tower, value in enumerate(values):
        groups.setdefault(value, []).append(tower)
    return sorted(groups.values(), key=lambda towers: -len(towers))


def who_differs(groups: Sequence[Sequence[int]]) -> str:
    """Returns ``tower 2 differs from towers 0, 1 and 3`` if most towers agree, otherwise a similar description."""
    if all(len(towers) == 1 for towers in groups) and len(groups) > 2:
        return "it is different on every tower"
    majority, *others = groups
    if len(others) == 1 and len(others[0]) == len(majority):
        return f"{name_towers(majority)} differ{'s' * (len(majority) == 1)} from {name_towers(others[0])}"
    odd = sorted(tower for towers in others for tower in towers)
    apart = ", and from each other" if len(others) > 1 else ""
    return f"{name_towers(odd)} differ{'s' * (len(odd) == 1)} from {name_towers(majority)}{apart}"
