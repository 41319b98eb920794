"""Averaging gradients that come as sparse tensors (``nn.Embedding(sparse=True)``)."""

from __future__ import annotations

import torch
from torch import Tensor

from towers.collectives import values
from towers.collectives.communicator import Communicator
from towers.slots import Slot


class SparseSlot(Slot):
    """A parameter with sparse gradients. Its rows are gathered, not reduced: only those that exist travel."""

    __slots__ = ()

    def average(self, channel: Communicator) -> None:
        """Replace the gradient by the mean over towers; a tower without one contributes zero.

        The result is sparse and coalesced, unless some tower's gradient is dense (the embedding is also used
        as an ordinary matrix): then it is dense on all.
        """
        parameter = self.parameter
        gradient = None if parameter is None else parameter.grad
        if gradient is None:
            gradient = self._nothing(channel.device)
        dense_somewhere = channel.all_gather(torch.tensor([0 if gradient.is_sparse else 1]))
        if dense_somewhere.any():
            mean = to_dense(gradient) if gradient.is_sparse else gradient.clone()
            channel.all_reduce(mean)
            mean /= channel.size
        else:
            mean = self._average_rows(channel, gradient.coalesce())
        if parameter is not None:
            parameter.grad = mean
        self.arrived = self.unsynced = False

    def _nothing(self, device: torch.device) -> Tensor:
        indices = torch.empty((1, 0), dtype=torch.int64, device=device)
        rows = torch.empty((0, *self.shape[1:]), dtype=self.dtype, device=device)
        return torch.sparse_coo_tensor(indices, rows, self.shape, check_invariants=False)

    def _average_rows(self, channel: Communicator, gradient: Tensor) -> Tensor:
        indices, rows = gradient.indices().T.contiguous(), gradient.values()
        counts = channel.all_gather(torch.tensor([indices.shape[0]])).flatten().tolist()
        all_indices = values.join(channel, indices, [(n, indices.shape[1]) for n in counts], 0)
        all_rows = values.join(channel, rows, [(n, *rows.shape[1:]) for n in counts], 0)
        joined = torch.sparse_coo_tensor(all_indices.T, all_rows / channel.size, gradient.shape, check_invariants=False)
        return joined.coalesce()


def to_dense(gradient: Tensor) -> Tensor:
    """A sparse tensor as a dense one.

    ``Tensor.to_dense`` loses values that are an expanded scalar (seen with torch 2.13, the gradient of
    ``Embedding(4, 1, sparse=True)(x).sum()``).
    """
    gradient = gradient.coalesce()
    dense = torch.zeros(gradient.shape, dtype=gradient.dtype, device=gradient.device)
    return dense.index_put_(tuple(gradient.indices()), gradient.values().contiguous())
