"""The sum of sparse tensors: those elements travel that exist."""

from __future__ import annotations

import torch
from torch import Tensor

from towers.collectives.communicator import Communicator


def sparse_sum(comm: Communicator, tensor: Tensor) -> None:
    """Replace a sparse tensor (COO) by the sum of all towers', coalesced."""
    mine = tensor.coalesce()
    counts = comm.all_gather(torch.tensor([mine.indices().shape[1]], device="cpu")).flatten().tolist()
    most = max(counts)
    indices = torch.zeros((mine.sparse_dim(), most), dtype=torch.int64, device="cpu")
    rows = torch.zeros((most, *mine.values().shape[1:]), dtype=mine.dtype, device="cpu")
    indices[:, : mine.indices().shape[1]] = mine.indices()
    rows[: mine.values().shape[0]] = mine.values()
    all_indices = [part[:, :n] for part, n in zip(comm.all_gather(indices), counts, strict=True)]
    all_rows = [part[:n] for part, n in zip(comm.all_gather(rows), counts, strict=True)]
    total = torch.sparse_coo_tensor(
        torch.cat(all_indices, 1), torch.cat(all_rows), tensor.shape, device="cpu", check_invariants=False
    )
    tensor.copy_(total.coalesce())  # a detached sparse tensor would be another one
