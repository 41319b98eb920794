"""Fingerprints of tensors: every element, bit and place counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from towers.mirroring import COLUMNS, fingerprints

BIG = 8 * COLUMNS + 5  # elements of eight bytes: rows to fold, and a rest


def fingerprint(tensor: Tensor) -> int:
    return int(fingerprints([tensor])[0])


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex128, torch.int8, torch.bool]
)
@pytest.mark.parametrize("numel", [1, 3, BIG, 9 * BIG + 3])
def test_every_element_counts(dtype: torch.dtype, numel: int) -> None:
    tensor = (torch.arange(numel) % 2).to(dtype)
    known = {fingerprint(tensor)}
    places = {0, numel // 3, numel // 2, numel - 1}
    for place in places:
        other = tensor.clone()
        other[place] = 1 - int(other[place].real)
        known.add(fingerprint(other))
    assert len(known) == 1 + len(places)


@pytest.mark.parametrize("numel", [6, BIG])
@pytest.mark.parametrize("bit", [0, 31, 63])
def test_every_bit_counts(numel: int, bit: int) -> None:
    words = torch.randn(numel, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).view(torch.int64)
    flipped = words.clone()
    flipped[numel // 2] ^= torch.tensor(1 << bit if bit < 63 else -(1 << 63))
    assert fingerprint(words) != fingerprint(flipped)


@pytest.mark.parametrize("numel", [6, BIG])
def test_bits_count_that_compare_equal(numel: int) -> None:
    zeros = torch.zeros(numel, dtype=torch.float64)
    quiet = torch.full_like(zeros, float("nan"))
    payload = quiet.clone()
    payload.view(torch.int64)[2] += 1
    assert len({fingerprint(t) for t in (zeros, -zeros, quiet, payload)}) == 4


@pytest.mark.parametrize("distance", [1, COLUMNS, 3 * COLUMNS], ids=["neighbours", "one column", "one column, far"])
@pytest.mark.parametrize("values", [(1.0, 2.0), (0.0, -0.0), (0.5, -0.5)])
def test_order_counts(distance: int, values: tuple[float, float]) -> None:
    tensor = torch.randn(BIG, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    one, other = tensor.clone(), tensor.clone()
    one[5], one[5 + distance] = values
    other[5 + distance], other[5] = values
    assert fingerprint(one) != fingerprint(other)


def test_a_fingerprint_is_of_the_tensor_alone() -> None:
    matrix = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
    alone = fingerprint(matrix)
    others = [torch.ones(2, dtype=torch.bool), torch.ones(BIG), torch.zeros(0), torch.tensor(3.0)]
    assert int(fingerprints([*others, matrix])[4]) == alone
    assert fingerprint(matrix.t().contiguous().t()) == alone
    assert fingerprint(torch.cat([torch.ones(1), matrix.view(-1)])[1:]) == alone
    assert fingerprint(matrix.t()) != alone
    assert fingerprint(matrix.to(torch.float64)) != alone
    assert fingerprints([]).shape == (0,)
