"""Tensors on their way between processes, by the part of a variable that they are of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from mirrored.parameter_server.layout import Part


class Values(dict[Part, Tensor]):
    """Tensors by part; sparse ones are coalesced.

    They are pickled as NumPy arrays, which Ray sends as they lie in memory: torch's own pickles are archives of bytes
    for each tensor.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpack_all, ({part: _pack(tensor) for part, tensor in self.items()},)


def _unpack_all(packed: Mapping[Part, Any]) -> Values:
    return Values({part: _unpack(*entry) for part, entry in packed.items()})


def _pack(tensor: Tensor) -> tuple[Any, Any, tuple[int, ...]]:
    if tensor.is_sparse:
        return _pack(tensor.coalesce().indices()), _pack(tensor.coalesce().values()), tuple(tensor.shape)
    there = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)  # NumPy has no bfloat16
    return there.numpy(), tensor.dtype, tuple(tensor.shape)


def _unpack(memory: Any, kind: Any, shape: tuple[int, ...]) -> Tensor:
    if isinstance(memory, tuple):
        parts = _unpack(*memory), _unpack(*kind)
        return torch.sparse_coo_tensor(*parts, shape, is_coalesced=True, check_invariants=False)
    return torch.tensor(memory).view(kind).reshape(shape)  # a copy: what Ray has received may not be written to
