"""The layout of tensors in memory, and in a flat buffer."""

from __future__ import annotations

import torch
from torch import Tensor

from towers.system.torch_private import storage_holders


def view_like(tensor: Tensor, buffer: Tensor) -> Tensor:
    """Returns the start of ``buffer`` in the shape of ``tensor``, with its strides if they are dense.

    Args:
        buffer: flat, of the tensor's dtype; for complex numbers, pairs of real ones.
    """
    if tensor.is_complex():
        flat = torch.view_as_complex(buffer[: 2 * tensor.numel()].view(-1, 2))
    else:
        flat = buffer[: tensor.numel()]
    if tensor.is_contiguous() or not is_dense(tensor):
        return flat.view(tensor.shape)
    return flat.as_strided(tensor.shape, tensor.stride(), flat.storage_offset())


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """Returns the dtype of a parameter's gradient: its ``grad_dtype`` if it has one, otherwise its own dtype."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def is_dense(tensor: Tensor) -> bool:
    """Returns whether a tensor's elements fill their memory without gaps or overlaps (channels-last, transposed …)."""
    dense: bool = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return dense


def contiguous(tensor: Tensor) -> Tensor:
    """Returns the tensor, or a copy if it is not contiguous or is a lazily conjugated or negated view."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def copy_back(dense: Tensor, tensor: Tensor) -> None:
    """Gives ``tensor`` the values of ``dense``, unless they are the same memory (:func:`contiguous`)."""
    if dense.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(dense)


ALONE = storage_holders(torch.zeros(1, device="cpu"))
"""The result of :func:`towers.system.torch_private.storage_holders` for a tensor that does not share its memory."""
