"""Fingerprints: 64 bits that show whether a tensor is the same on all towers (rule R1, docs/concepts/towers.md).

The bits count, not the values: 0.0 and -0.0 differ, and so do two NaNs with different payloads. A large tensor is first
folded, as a matrix of words, into the sums of its columns and of its rows. One changed word changes one column; two
swapped words change two columns or two rows. Only changes at the four corners of a rectangle can cancel. The result is
mixed with its position, so that the order counts, and added up. Different words have equal fingerprints with a
probability of about 2^-64.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from towers.collectives.communicator import as_bytes
from towers.system.host_copy import on_device

COLUMNS = 1021  # a prime, so that no row of a weight matrix falls onto the columns of the previous row

_WORDS = {1: torch.uint8, 4: torch.int32, 8: torch.int64}
# as the int64 numbers with these bits
_GOLDEN, _FIRST, _SECOND = (n - (1 << 64) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


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
