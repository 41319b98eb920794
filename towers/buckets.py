"""Buckets: flat buffers in which many parameters' gradients travel in one collective.

A bucket's buffer holds, one after the other::

    | gradient of slot 0 | slot 1 | … | used? (one number a slot) | touched? (one number a bucket of all) |

The tail makes unused parameters exact without a collective of their own: after the sum over towers, a slot's
"used?" says how many towers computed that gradient in this backward, and in the bucket that closes a backward
"touched?" says which buckets any tower has gradients for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from towers.mirror import Named
from towers.slots import Slot
from towers.sparse import to_dense

_ALIGNMENT_BYTES = 64
FIRST_BUCKET_BYTES = 2**20


class DenseSlot(Slot):
    """One parameter's place in a bucket.

    Attributes:
        bucket, start: where it is, in elements of the bucket's dtype.
        view: where in the buffer its gradient lies, in the parameter's shape and strides. It is never handed
            out itself: ``p.grad.data = …`` (as ``Module.to`` does) would move it out of the buffer.
    """

    __slots__ = ("bucket", "start", "view")

    def __init__(self, named: Named, bucket: Bucket, start: int) -> None:
        super().__init__(named)
        self.bucket = bucket
        self.start = start
        self.view: Tensor | None = None

    def is_in_view(self, gradient: Tensor | None) -> bool:
        """Whether ``gradient`` is this slot's place in the buffer."""
        view = self.view
        if view is None or gradient is None or gradient.is_sparse or gradient.data_ptr() != view.data_ptr():
            return False
        return gradient.stride() == view.stride() and gradient.dtype == view.dtype

    def hand_out(self, parameter: Tensor) -> None:
        """Make the parameter's gradient this slot's place in the buffer."""
        assert self.view is not None
        parameter.grad = self.view.detach()


class Bucket:
    """A flat buffer of gradients of one dtype and device. Complex numbers travel as pairs of real ones."""

    def __init__(self, index: int, dtype: torch.dtype, device: torch.device) -> None:
        self.index = index
        self.dtype = dtype
        self.device = device
        self.slots: list[DenseSlot] = []
        self.numel = 0
        self.missing = 0
        self.launched = False
        self._all_fresh = False
        self._buffer: Tensor | None = None
        self._tail: Tensor | None = None
        self._own_holders = 0

    def add(self, named: Named) -> DenseSlot:
        """Give a parameter the next aligned place."""
        real = 2 if named.tensor.is_complex() else 1
        step = _ALIGNMENT_BYTES // self.dtype.itemsize
        start = -(-self.numel // step) * step
        slot = DenseSlot(named, self, start)
        self.slots.append(slot)
        self.numel = start + real * named.tensor.numel()
        return slot

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def has_fresh(self) -> bool:
        """Whether this tower has anything of its own to contribute."""
        return any(slot.fresh for slot in self.slots)

    def reset(self) -> None:
        """After a backward: nothing has arrived, nothing is unsynced."""
        self.launched = False
        for slot in self.slots:
            slot.arrived = slot.unsynced = False

    def count_missing(self) -> None:
        """Before a backward: how many gradients it can bring."""
        parameters = (slot.parameter for slot in self.slots)
        self.missing = sum(parameter is not None and parameter.requires_grad for parameter in parameters)

    def pack(self, scale: float, touched: Sequence[bool] | None, buckets: int) -> Tensor:
        """Bring the gradients, times ``scale``, and the tail into the buffer; ready to be summed over towers.

        From here on the gradients of fresh slots lie in the buffer. A slot without a fresh gradient contributes
        what it holds (equal on all towers, so its mean is itself), else zero.
        """
        parameters = [slot.parameter for slot in self.slots]
        gradients = [None if parameter is None else parameter.grad for parameter in parameters]
        in_view = [slot.is_in_view(gradient) for slot, gradient in zip(self.slots, gradients, strict=True)]
        if self._buffer is None or _holders(self._buffer) > self._own_holders + sum(in_view):
            # Somebody keeps a gradient of an earlier backward, which must not change under his hands.
            self._allocate(buckets)
            in_view = [False] * len(in_view)
        assert self._buffer is not None
        assert self._tail is not None
        for slot, parameter, gradient, inside in zip(self.slots, parameters, gradients, in_view, strict=True):
            assert slot.view is not None
            if gradient is None:
                slot.view.zero_()
            elif inside:
                slot.view.mul_(scale)
            else:
                torch.mul(to_dense(gradient) if gradient.is_sparse else gradient, scale, out=slot.view)
                if slot.fresh:
                    slot.hand_out(parameter)  # type: ignore[arg-type]
        used = [slot.fresh for slot in self.slots]
        self._all_fresh = all(used)
        _write(self._tail[: len(used)], used)
        _write(self._tail[len(used) :], touched or [False] * buckets)
        self.launched = True
        return self._buffer

    def settle(self) -> None:
        """After the sum: parameters that only other towers used get their gradient too."""
        if self._all_fresh:  # reading the counts would make the host wait for a GPU
            return
        assert self._tail is not None
        counts = self._tail[: len(self.slots)].tolist()
        for slot, count in zip(self.slots, counts, strict=True):
            if count > 0 and (parameter := slot.parameter) is not None and not slot.is_in_view(parameter.grad):
                slot.hand_out(parameter)

    def touched(self) -> list[bool]:
        """After the sum of a bucket that closed a backward: which buckets any tower had gradients for."""
        assert self._tail is not None
        return [count > 0 for count in self._tail[len(self.slots) :].tolist()]

    def _allocate(self, buckets: int) -> None:
        tail = len(self.slots) + buckets
        self._buffer = torch.zeros(self.numel + tail, dtype=self.dtype, device=self.device)
        self._tail = self._buffer[self.numel :]
        for slot in self.slots:
            parameter = slot.parameter
            if parameter is not None:
                slot.view = _view_like(parameter, self._buffer[slot.start :])
            else:
                slot.view = self._buffer[:0]
        self._own_holders = _holders(self._buffer)


def _holders(tensor: Tensor) -> int:
    """How many tensors lie in the memory of ``tensor``: it and all views of it that are still alive."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def _write(target: Tensor, flags: Sequence[bool]) -> None:
    """Write flags as numbers, without a copy from the host where they are all alike."""
    if all(flags):
        target.fill_(1)
    elif not any(flags):
        target.zero_()
    else:
        target.copy_(torch.tensor(flags, dtype=target.dtype))


def _view_like(parameter: Tensor, buffer: Tensor) -> Tensor:
    """The start of ``buffer`` in the shape of ``parameter``, with its strides where they are dense."""
    if parameter.is_complex():
        pairs = buffer[: 2 * parameter.numel()].view(*parameter.shape, 2)
        return torch.view_as_complex(pairs)
    flat = buffer[: parameter.numel()]
    if parameter.is_contiguous() or not _is_dense(parameter):
        return flat.view(parameter.shape)
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset())


def _is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill their memory without gaps or overlaps (channels-last, transposed …)."""
    expected = 1
    for size, stride in sorted(zip(tensor.shape, tensor.stride(), strict=True), key=lambda pair: pair[1]):
        if size > 1:
            if stride != expected:
                return False
            expected *= size
    return True


def lay_out(parameters: Sequence[Named], bucket_bytes: int) -> list[Bucket]:
    """Distribute parameters over buckets of about ``bucket_bytes``, one dtype and device each.

    Last created comes first, since backward usually reaches it first; the first bucket is small, so that the
    first collective starts early. Parameters that were frozen from the start lie in buckets of their own, which
    cost nothing until one is thawed. There is always at least one bucket.
    """
    buckets: list[Bucket] = []
    for trainable in (True, False):
        filling: dict[tuple[torch.dtype, torch.device], Bucket] = {}
        for named in reversed(parameters):
            tensor = named.tensor
            if named.trainable != trainable:
                continue
            key = (tensor.dtype.to_real() if tensor.is_complex() else tensor.dtype, tensor.device)
            bucket = filling.get(key)
            limit = FIRST_BUCKET_BYTES if bucket is not None and bucket.index == 0 else bucket_bytes
            if bucket is None or bucket.nbytes >= min(limit, bucket_bytes):
                bucket = filling[key] = Bucket(len(buckets), *key)
                buckets.append(bucket)
            bucket.add(named)
    if not buckets:
        buckets.append(Bucket(0, torch.float32, torch.device("cpu")))
    return buckets
