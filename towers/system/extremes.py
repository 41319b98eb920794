"""Finds NaN and infinities, without waiting for a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def extremes(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the largest magnitude in each tensor: NaN if it contains NaN, otherwise infinity if it contains one.

    Args:
        tensors: real, complex (their parts count), sparse or integer tensors, on one device or several.

    Returns:
        float64, shape ``(len(tensors),)``, on a GPU if any tensor is on one; 0 for an empty tensor.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    ends = concatenated([end.view(1) for tensor in tensors for end in _ends(tensor)]).double()
    return torch.maximum(-ends[::2], ends[1::2])


def _ends(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the least and the greatest element; both are NaN if there is a NaN."""
    dense = tensor._values() if tensor.is_sparse else tensor
    real = torch.view_as_real(dense) if dense.is_complex() else dense
    if not real.numel():
        zero = torch.zeros((), device=tensor.device)
        return zero, zero
    if real.dtype.itemsize == 1:
        real = real.float()  # torch does not compare numbers of eight bits
    low, high = torch.aminmax(real)
    return low, high


def concatenated(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenates flat tensors, on a GPU if any is on one: a copy to the host would be read before it has arrived."""
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), tensors[0].device)
    return torch.cat([tensor.to(device, non_blocking=True) for tensor in tensors])


def what_is_not_finite(names: Sequence[str], highest: Tensor) -> dict[str, str]:
    """Returns those of ``names`` whose extreme is not finite, with "nan" or "inf"."""
    values = zip(names, highest.tolist(), strict=True)
    return {name: "nan" if math.isnan(value) else "inf" for name, value in values if not math.isfinite(value)}
