"""Averages sparse gradients (``nn.Embedding(sparse=True)``)."""

from __future__ import annotations

import torch
from torch import Tensor

from towers.collectives import values
from towers.collectives.communicator import Communicator


def has_rows(gradient: Tensor) -> bool:
    """Returns whether a gradient can be reduced row by row: it is sparse in its first dimension only."""
    return gradient.is_sparse and gradient.sparse_dim() == 1


def without_rows(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns the sparse gradient of a tower that has used no row."""
    indices = torch.empty((1, 0), dtype=torch.int64, device=device)
    rows = torch.empty((0, *shape[1:]), dtype=dtype, device=device)
    return torch.sparse_coo_tensor(indices, rows, shape, device=device, check_invariants=False)


def sum_rows(comm: Communicator, tensor: Tensor) -> Tensor:
    """Returns the sum over towers of tensors that are sparse (COO, any sparse dimensions) on all of them, coalesced."""
    indices, rows, _ = _gather_rows(comm, tensor.coalesce())
    return _from_rows(indices, rows, tensor.shape).coalesce()


def average_rows(channel: Communicator, gradient: Tensor) -> Tensor:
    """Returns the mean over towers of a tensor that is sparse in its first dimension on all of them, coalesced."""
    return sum_rows(channel, gradient.coalesce() / channel.size)


def rows_of_towers(channel: Communicator, gradient: Tensor) -> list[Tensor]:
    """Returns every tower's tensor, coalesced. The tensors must be sparse in their first dimension on all towers."""
    indices, rows, counts = _gather_rows(channel, gradient.coalesce())
    return [
        _from_rows(i, r, gradient.shape, is_coalesced=True)
        for i, r in zip(indices.split(counts), rows.split(counts), strict=True)
    ]


def _from_rows(indices: Tensor, rows: Tensor, shape: torch.Size, is_coalesced: bool = False) -> Tensor:
    return torch.sparse_coo_tensor(
        indices.T, rows, shape, device=rows.device, is_coalesced=is_coalesced, check_invariants=False
    )


def _gather_rows(channel: Communicator, gradient: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """Returns the indices and rows of all towers, and each tower's number of rows."""
    indices, rows = gradient.indices().T.contiguous(), gradient.values()
    counts = channel.all_gather(torch.tensor([indices.shape[0]], device="cpu")).flatten().tolist()
    all_indices = values.concatenate(channel, indices, [(n, indices.shape[1]) for n in counts], 0)
    return all_indices, values.concatenate(channel, rows, [(n, *rows.shape[1:]) for n in counts], 0), counts


def add_sparse(left: Tensor, right: Tensor) -> Tensor:
    """Returns the sum of two tensors, at least one of them sparse. It is coalesced, unless the other one is dense."""
    if left.is_sparse and right.is_sparse:
        return (left.coalesce() + right.coalesce()).coalesce()
    return (to_dense(left) if left.is_sparse else left) + (to_dense(right) if right.is_sparse else right)


def to_dense(gradient: Tensor) -> Tensor:
    """Returns a sparse tensor as a dense one.

    ``Tensor.to_dense`` loses values that are an expanded scalar (seen with torch 2.13, the gradient of ``Embedding(4,
    1, sparse=True)(x).sum()``).
    """
    gradient = gradient.coalesce()
    dense = torch.zeros(gradient.shape, dtype=gradient.dtype, device=gradient.device)
    return dense.index_put_(tuple(gradient.indices()), gradient.values().contiguous())
