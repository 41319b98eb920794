"""PowerSGD (arXiv:1905.13727): gradients that are sent as products of two thin matrices.

A gradient is a matrix of shape (rows, columns), transposed if it has more rows than columns. Its product is that of P,
of shape (rows, rank), and the transpose of Q, of shape (columns, rank). The rest of the gradient is the tower's
*error*, which is added to its next gradient. One average consists of these steps::

    start     error += gradient;  P = error · orthogonalized Q of the last time
              average P, together with gradients too small for compression, while backward continues
    finish    orthogonalize P;  Q = errorᵀ · P
              average Q and the orthogonalized P
              gradient = P · Qᵀ;  error -= gradient

P and Q are linear in the gradient. Their means over the towers of a host, computed in shared memory, are therefore
those of the host's mean gradient, and only they are sent over the network.

[Note: P is averaged twice] LAPACK's rounding in the orthogonalization depends on the number of threads (1, 2 and 4
threads gave three results). This number differs between hosts of different numbers of towers. The product of the two
means does not depend on it: each sum has only as many terms as the rank, in order. All towers thus multiply the same P.

[Note: torch's hook] ``powerSGD_hook`` of torch's ``ddp_comm_hooks`` computes the same, and is not used. It runs its
collectives itself, on one c10d group and in callbacks on Gloo's threads. Waits would have no deadline and no name, and
hosts no two levels. It compresses gradients that no tower has used, so errors are lost, and a NaN never leaves its
errors. For CPU towers on a machine with GPUs it fails, because it synchronises with a GPU.

[Note: unused parameters] Whether any tower has used a parameter is known with P. A gradient that no tower has computed
stays unchanged, and so does its error. Between accelerators these flags arrive later, so all parameters count as used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from towers.collectives.communicator import Communicator
from towers.gradients.buckets import Bucket, DenseSlot
from towers.gradients.reductions import AllReduce
from towers.options import Compression
from towers.system.torch_private import foreach_copy_

_REFUSED = {
    "virtual_towers": "virtual_towers promise the same bits on any number of towers",
    "central": "the towers of CentralStorageStrategy are on one host, where nothing is sent",
    "shard_optimizer": "shard_optimizer=True sends all parameters in every step",
    "synchronize": "with synchronize= towers send no gradients",
}


@dataclasses.dataclass(frozen=True)
class PowerSGD(Compression):
    """Sends gradients of two or more dimensions as products of two thin matrices (arXiv:1905.13727).

    A gradient of shape (n, …) counts as a matrix of n rows. It is compressed if that takes less than half of its bytes.
    All other gradients, and sparse ones, are sent unchanged.

    Args:
        rank: the number of columns of the thin matrices, at least 1. A larger rank is closer to the gradient, and takes
            more bytes.
        start_step: the number of averages, one per backward, before the first compressed one. These are exact.

    Raises:
        ValueError: an argument is not a whole number, or too small.
    """

    rank: int = 4
    start_step: int = 1000

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("start_step", 0)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"PowerSGD: {name} is {value!r}, but must be a whole number from {least}")


def checked(how: Compression, training: Mapping[str, Any]) -> PowerSGD:
    """Returns the compression, if a strategy's other options (by name) are compatible with it.

    Raises:
        ValueError: an option is not.
    """
    assert isinstance(how, PowerSGD), "no other way exists"
    for name, reason in _REFUSED.items():
        if training[name] not in (None, False):
            raise ValueError(f"compression= averages gradients approximately, while {reason}: leave one of the two out")
    return how


@dataclasses.dataclass
class _Matrix:
    """The state of a gradient between backward passes.

    Attributes:
        error: (rows, columns), this tower's, times :attr:`Reduction.scale`; including the gradient, until Q is
            averaged.
        q: (columns, rank), the last mean Q, the same on all towers.
    """

    error: Tensor
    q: Tensor


class LowRankAverage(AllReduce):
    """Averages gradients as products of thin matrices. At first, and if compression has no gain, it runs all-reduces.

    The means have the same bits on all towers whose devices multiply identically (see [Note: P is averaged twice]).

    Attributes:
        step: the number of averages so far. A checkpoint sets it on all towers; it does not contain errors and Qs.
    """

    def __init__(self, channel: Communicator, how: PowerSGD) -> None:
        super().__init__(channel)
        self.step = 0
        self._how = how
        self._matrices = WeakIdKeyDictionary()  # by parameter
        self._running: list[Iterator[None]] = []

    def start(self, bucket: Bucket) -> None:
        begun = self.step >= self._how.start_step
        matrices = {slot: self._matrix(slot, rank) for slot in bucket.slots if begun and (rank := self._rank(slot))}
        if not matrices:
            super().start(bucket)
            return
        self._running.append(self._average(bucket, matrices))
        next(self._running[-1])

    def finish(self, buckets: Sequence[Bucket]) -> list[Tensor]:
        tails = super().finish(buckets)
        running, self._running = self._running, []
        for _ in range(2):  # P has arrived, then Q
            for average in running:
                next(average, None)
        self.step += 1
        return tails

    def _average(self, bucket: Bucket, matrices: dict[DenseSlot, _Matrix]) -> Iterator[None]:
        """Averages a bucket in three stages: at each ``yield``, a collective is running.

        Args:
            matrices: the gradients that are sent as products.
        """
        for slot, matrix in matrices.items():
            matrix.error += _wide(slot)
        ps = [_product(matrix.error, _orthogonal(matrix.q)) for matrix in matrices.values()]
        others = [_flat(slot) for slot in bucket.slots if slot not in matrices]
        yield from self._send([*others, bucket.tail, *ps])
        ps = [_orthogonal(p) for p in ps]
        qs = [_product(matrix.error.T, p) for matrix, p in zip(matrices.values(), ps, strict=True)]
        yield from self._send([*qs, *(p.mul_(self.scale) for p in ps)])  # see [Note: P is averaged twice]
        # see [Note: unused parameters]
        flags = bucket.tail.tolist() if self._channel.device.type == "cpu" else [1.0] * len(bucket.slots)
        used = {slot for slot, flag in zip(bucket.slots, flags, strict=False) if flag}
        for (slot, matrix), p, q in zip(matrices.items(), ps, qs, strict=True):
            gradient = _wide(slot)
            if slot in used:
                matrix.q = q
                torch.mm(p, q.T, out=gradient)
            matrix.error.sub_(gradient, alpha=self.scale if slot in used else 1.0).nan_to_num_(0.0, 0.0, 0.0)

    def _send(self, tensors: list[Tensor]) -> Iterator[None]:
        """Averages tensors in place, in one collective."""
        # with out=, torch.autocast does not change the dtype
        message = torch.cat([tensor.reshape(-1) for tensor in tensors], out=tensors[0].new_empty(0))
        pending = self._channel.submit_average(message)
        yield
        pending.wait()
        pieces = message.split([tensor.numel() for tensor in tensors])
        foreach_copy_(tensors, [piece.view_as(tensor) for piece, tensor in zip(pieces, tensors, strict=True)])

    def _rank(self, slot: DenseSlot) -> int:
        """Returns the rank of the product that is sent for a gradient, or 0 if the gradient itself is sent."""
        if len(slot.shape) < 2 or not slot.numel:
            return 0
        rows, columns = _wide(slot).shape
        rank = min(self._how.rank, rows)
        return rank if 2 * rank * (2 * rows + columns) < rows * columns else 0

    def _matrix(self, slot: DenseSlot, rank: int) -> _Matrix:
        """Returns the state of a gradient. A new one is created if there is none, or if its dtype or device differ.

        A tower whose parameter was deleted contributes zeros, for any Q.
        """
        wide, parameter = _wide(slot), slot.parameter()
        matrix: _Matrix | None = None if parameter is None else self._matrices.get(parameter)
        if matrix is None or (matrix.error.dtype, matrix.error.device) != (wide.dtype, wide.device):
            same = torch.Generator(device="cpu").manual_seed(0)  # the same numbers on all towers
            q = torch.randn((wide.shape[1], rank), generator=same, dtype=torch.float32, device="cpu").to(wide)
            matrix = _Matrix(torch.zeros_like(wide), q)
            if parameter is not None:
                self._matrices[parameter] = matrix
        return matrix


def _flat(slot: DenseSlot) -> Tensor:
    """Returns a slot's part of its bucket, in the order of its memory."""
    return slot.bucket.buffer[slot.start : slot.start + slot.numel]


def _wide(slot: DenseSlot) -> Tensor:
    """Returns the same part as a matrix that has no more rows than columns."""
    matrix = _flat(slot).view(slot.shape[0], -1)
    return matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Returns ``a @ b`` in their dtype, even within ``torch.autocast``. It is stored by columns, which is faster."""
    return torch.mm(a, b, out=a.new_empty((b.shape[1], a.shape[0])).T)


def _orthogonal(tall: Tensor) -> Tensor:
    """Returns an orthonormal basis of a space with the columns of ``tall``, which may be dependent or not finite."""
    finite = tall.nan_to_num(0.0, 0.0, 0.0)
    basis: Tensor = torch.linalg.qr(finite.to(torch.promote_types(tall.dtype, torch.float32)))[0]
    return basis.to(tall.dtype)
