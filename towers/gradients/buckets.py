"""Buckets: flat buffers in which many parameters' gradients travel in one collective.

A bucket's buffer holds, one after the other::

    | gradient of slot 0 | slot 1 | … | used? (one number a slot) | touched? (one number a bucket of all) | backward |

The tail makes unused parameters exact without a collective of their own: after the sum over towers, a slot's "used?"
says how many towers computed that gradient in this backward, and in the bucket that closes a backward "touched?" says
which buckets any tower has gradients for, and the last numbers which backward it is (:mod:`towers.gradients.pairing`).
(Between GPUs these flags go by way of the hosts instead: :mod:`towers.gradients.flags`.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

from towers.collectives.arithmetic import CHUNK_ALIGNMENT
from towers.collectives.communicator import Communicator
from towers.errors import MirrorError, TowersError
from towers.gradients.lazy import make_pending, make_plain
from towers.gradients.slots import Slot
from towers.gradients.sparse import to_dense
from towers.mirroring.mirror import Named
from towers.system.memory_layout import ALONE, flatten_real, gradient_dtype, holders, view_like

FIRST_BUCKET_BYTES = 2**20
_LARGE_BYTES = 2**17  # from here on bringing a gradient at once saves more than one call for many does
_APART = 0.4  # how much of a gradient must be this tower's own part to leave it where it is


class DenseSlot(Slot):
    """One parameter's place in a bucket.

    Attributes:
        bucket, start: where it is, in elements of the bucket's dtype.
        view: where in the buffer its gradient lies, in the parameter's shape and strides. It is never handed
            out itself: ``p.grad.data = …`` (as ``Module.to`` does) would move it out of the buffer.
        large: its gradient is brought into the buffer as soon as it is there.
        filled: the gradient that was brought into the buffer before its time, and its version then.
        complete: where it is set, gradients are handed out as pending ones that call it.
        apart: the gradient stays where autograd put it, and its part that this tower averages is not in the buffer.
        packed: the parameter's gradient when its bucket was packed, until the backward is over.
    """

    __slots__ = ("_left", "_pending", "apart", "bucket", "complete", "filled", "large", "packed", "start", "view")

    def __init__(self, named: Named, bucket: Bucket, start: int) -> None:
        super().__init__(named)
        self.bucket = bucket
        self.start = start
        self.large = named.tensor.nbytes >= _LARGE_BYTES
        self.view: Tensor | None = None
        self.filled: tuple[Tensor, int] | None = None
        self.complete: Callable[[], None] | None = None
        self.apart = False
        self.packed: Tensor | None = None
        self._pending: TensorWeakRef | None = None
        self._left: TensorWeakRef | None = None

    @property
    def numel(self) -> int:
        """Elements of the bucket's dtype."""
        return self.shape.numel() * (2 if self.dtype.is_complex else 1)

    @property
    def own(self) -> tuple[int, int]:
        """Where the part that this tower averages begins and ends, in elements of the bucket's dtype from its start."""
        start, end = (max(0, min(bound - self.start, self.numel)) for bound in self.bucket.own)
        return start, end

    @property
    def pending(self) -> Tensor | None:
        """The gradient that was handed out last, if it is pending and somebody still holds it."""
        found: Tensor | None = self._pending() if self._pending is not None else None
        return found

    def is_in_view(self, gradient: Tensor | None) -> bool:
        """Whether ``gradient`` is this slot's place in the buffer."""
        view = self.view
        if view is None or gradient is None or gradient.is_sparse or gradient.data_ptr() != view.data_ptr():
            return False
        return gradient.stride() == view.stride() and gradient.dtype == view.dtype

    def fill(self, gradient: Tensor, scale: float) -> None:
        """Bring ``gradient`` times ``scale`` into the buffer."""
        assert self.view is not None
        dense = to_dense(gradient) if gradient.is_sparse else gradient
        if scale == 1.0:
            self.view.copy_(dense)
        else:
            torch.mul(dense, scale, out=self.view)

    def leave_apart(self, gradient: Tensor) -> bool:
        """Bring only what other towers average of ``gradient``, if that is worth it; whether it was done."""
        view, (start, end) = self.view, self.own
        assert view is not None
        if end - start < _APART * self.numel or gradient.is_sparse or gradient.stride() != view.stride():
            return False
        if gradient.requires_grad or holders(gradient) != ALONE:  # in memory of its own alone can it be averaged
            return False
        source, target = flatten_real(gradient), flatten_real(view)
        target[:start].copy_(source[:start])
        target[end:].copy_(source[end:])
        self.make_pending(gradient)
        self._left = TensorWeakRef(gradient)
        self.apart = True
        return True

    def has_left(self, gradient: Tensor) -> bool:
        """Whether ``gradient`` is the one that was left where autograd had put it."""
        return self._left is not None and self._left() is gradient

    def is_filled_with(self, gradient: Tensor) -> bool:
        """Whether that has been done, and nobody has changed ``gradient`` since."""
        filled = self.filled
        return filled is not None and filled[0] is gradient and filled[1] == gradient._version

    def hand_out(self, parameter: Tensor) -> None:
        """Make the parameter's gradient this slot's place in the buffer."""
        assert self.view is not None
        parameter.grad = gradient = self.view.detach()
        self.make_pending(gradient)

    def make_pending(self, gradient: Tensor) -> None:
        """``gradient`` lies in the buffer; where it will not be averaged whole, have it completed before it is used."""
        if self.complete is not None:
            make_pending(gradient, self.complete)
            self._pending = TensorWeakRef(gradient)

    def make_plain(self) -> None:
        """Its gradient is averaged whole: nobody has to complete it any more."""
        pending, self._pending = self.pending, None
        if pending is not None:
            make_plain(pending)


class Bucket:
    """A flat buffer of gradients of one dtype and device. Complex numbers travel as pairs of real ones.

    Attributes:
        used: which slots had a gradient of this tower's own when they were packed.
        own: where the part that this tower averages begins and ends, if it averages only that.
    """

    def __init__(self, index: int, dtype: torch.dtype, device: torch.device) -> None:
        self.index = index
        self.key = index
        self.dtype = dtype
        self.device = device
        self.slots: list[DenseSlot] = []
        self.numel = 0
        self.own = 0, 0
        self.missing = 0
        self.launched = False
        self._ready = False
        self.used: list[bool] = []
        self.buffer: Tensor | None = None
        self.tail: Tensor | None = None
        self._own_holders = 0
        self._address = 0
        self._version = 0
        self._stream: torch.cuda.Stream | None = None
        self._several_streams = False

    def add(self, named: Named) -> DenseSlot:
        """Give a parameter the next aligned place."""
        real = 2 if named.tensor.is_complex() else 1
        start = -(-self.numel // self.alignment) * self.alignment
        slot = DenseSlot(named, self, start)
        self.slots.append(slot)
        self.numel = start + real * named.tensor.numel()
        return slot

    @property
    def alignment(self) -> int:
        """Slots begin at multiples of so many elements."""
        return CHUNK_ALIGNMENT // self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def has_fresh(self) -> bool:
        """Whether this tower has anything of its own to contribute."""
        return any(slot.fresh for slot in self.slots)

    def reset(self) -> None:
        """After a backward: nothing has arrived, nothing is unsynced."""
        self.launched = self._ready = self._several_streams = False
        self._stream = None
        for slot in self.slots:
            slot.arrived = slot.unsynced = False
            slot.filled = slot.packed = None

    def count_missing(self) -> None:
        """Before a backward: how many gradients it can bring."""
        parameters = (slot.parameter for slot in self.slots)
        self.missing = sum(parameter is not None and parameter.requires_grad for parameter in parameters)

    def follow(self) -> None:
        """On a GPU: what now comes is for the current stream, after what came before, perhaps on another.

        Gradients come on the stream on which autograd's node for the parameter was made, which is another one for a
        part of a model that was made a CUDA graph.
        """
        if self.device.type != "cuda":
            return
        stream, before = torch.cuda.current_stream(self.device), self._stream
        if before is not None and before != stream:
            stream.wait_stream(before)
            self._several_streams = True
        self._stream = stream

    def bring(self, slot: DenseSlot, channel: Communicator, scale: float, closing: int) -> None:
        """Bring a gradient that was just computed into the buffer, while the cache still holds it."""
        self._make_ready(channel, closing)
        parameter = slot.parameter
        gradient = None if parameter is None else parameter.grad
        slot.apart = False
        if gradient is not None and not slot.is_in_view(gradient):
            if slot.complete is not None and slot.leave_apart(gradient):
                slot.filled = gradient, gradient._version
                return
            slot.fill(gradient, scale)
            if scale == 1.0:
                # At once: the next gradient is then computed in the memory of this one, which the cache holds.
                slot.hand_out(parameter)  # type: ignore[arg-type]
            else:
                # A second gradient of this backward would be added to the scaled first.
                slot.filled = gradient, gradient._version

    def pack(
        self, channel: Communicator, scale: float, flags: Sequence[bool] | None, closing: int, *, tail: bool = True
    ) -> Tensor:
        """Bring all gradients, times ``scale``, and the tail into the buffer; ready to be summed over towers.

        From here on the gradients of fresh slots lie in the buffer, unless they are apart. A slot without a fresh
        gradient contributes what it holds (equal on all towers, so its mean is itself), else zero.

        Args:
            flags: for the bucket that closes a backward: which units this tower touched, and which backward it is.
            closing: how many those are.
            tail: whether the flags travel in the tail.
        """
        self._make_ready(channel, closing)
        assert self.buffer is not None
        assert self.tail is not None
        used = []
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        for slot in self.slots:
            parameter, fresh = slot.parameter, slot.fresh
            gradient = None if parameter is None else parameter.grad
            used.append(fresh)
            assert slot.view is not None
            slot.apart = slot.apart and gradient is not None and slot.is_filled_with(gradient)
            if slot.apart:
                slot.packed = gradient
                continue
            if gradient is None:
                slot.view.zero_()
            elif slot.is_filled_with(gradient):
                slot.hand_out(parameter)  # type: ignore[arg-type]
            elif slot.is_in_view(gradient):
                if scale != 1.0:
                    slot.view.mul_(scale)
                slot.make_pending(gradient)
            else:
                if self._several_streams and not gradient.is_sparse:  # its memory is free as soon as it is handed out
                    assert self._stream is not None
                    gradient.record_stream(self._stream)
                if scale == 1.0 and not gradient.is_sparse:
                    sources.append(gradient)
                    targets.append(slot.view)
                else:
                    slot.fill(gradient, scale)
                if fresh or slot.has_left(gradient):
                    slot.hand_out(parameter)  # type: ignore[arg-type]
            slot.filled = None
            slot.packed = None if parameter is None else parameter.grad
        if sources:
            torch._foreach_copy_(targets, sources)  # many small ones in one call
        self.used = used
        if tail:
            _write(self.tail[: len(used)], used)
            _write(self.tail[len(used) :], flags or [False] * closing)
        self.launched = True
        self._version = self.buffer._version
        return self.buffer

    def check_untouched(self, tower: int) -> None:
        """When backward is done: see that the gradients are those that were packed.

        Args:
            tower: this one, for messages.

        Raises:
            TowersError: the script has changed or replaced one meanwhile.
        """
        changed = [s for s in self.slots if (p := s.parameter) is not None and p.grad is not s.packed]
        if not changed and self.buffer is not None and self.buffer._version != self._version:
            changed = self.slots
        if changed:
            names = ", ".join(slot.name for slot in changed[:3])
            one_of = "one of " if len(changed) > 1 else ""
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise TowersError(
                f"the gradient of {one_of}{names}{more} was changed on tower {tower} during backward(), when it was "
                "already on its way to the other towers. A hook may change the gradient of its own parameter only; "
                "change the others before backward(), or when it has returned"
            )

    def _make_ready(self, channel: Communicator, closing: int) -> None:
        """Once in a backward, before anything is written into the buffer: see that it is nobody else's."""
        if self._ready:
            return
        self._ready = True
        gradients = [None if (parameter := slot.parameter) is None else parameter.grad for slot in self.slots]
        ours = sum(slot.is_in_view(gradient) for slot, gradient in zip(self.slots, gradients, strict=True))
        # torch may have moved the memory of all views at once (``share_memory_()``, queues of torch.multiprocessing).
        moved = self.buffer is not None and self.buffer.data_ptr() != self._address
        if self.buffer is None or moved or holders(self.buffer) > self._own_holders + ours:
            # Somebody keeps a gradient of an earlier backward, which must not change under his hands.
            self._allocate(channel, closing)

    def settle(self, tail: Callable[[], Tensor], number: int, tower: int) -> None:
        """After the sum: parameters that only other towers used get their gradient too.

        Args:
            tail: gives the sum of all towers' tails.
            number: of this backward.
            tower: this one, for messages.

        Raises:
            MirrorError: a parameter is frozen on this tower and not on another one.
        """
        for slot, used in zip(self.slots, self.used, strict=True):
            if used:
                slot.averaged = number
        if all(self.used):  # reading the counts may make the host wait
            return
        counts = tail()[: len(self.slots)].tolist()
        for slot, count, used in zip(self.slots, counts, self.used, strict=True):
            parameter = slot.parameter
            if count == 0 or parameter is None:
                continue
            if not used and not parameter.requires_grad:
                raise MirrorError(
                    f"parameter {slot.name} is frozen (requires_grad is False) on tower {tower}, but another tower has "
                    "computed a gradient for it: freeze and thaw the same parameters on all towers"
                )
            slot.averaged = number
            if not slot.apart and not slot.is_in_view(parameter.grad):
                slot.hand_out(parameter)

    def closing_counts(self, tail: Tensor) -> list[float]:
        """After the sum of a bucket that closed a backward: for each of its flags, how many towers have set it."""
        counts: list[float] = tail[len(self.slots) :].tolist()
        return counts

    def _allocate(self, channel: Communicator, closing: int) -> None:
        tail = len(self.slots) + closing
        self.buffer = channel.allocate(self.key, self.numel + tail, self.dtype, self.device)
        self.tail = self.buffer[self.numel :]
        for slot in self.slots:
            parameter = slot.parameter
            if parameter is not None:
                slot.view = view_like(parameter, self.buffer[slot.start :])
            else:
                slot.view = self.buffer[:0]
        self._own_holders = holders(self.buffer)
        self._address = self.buffer.data_ptr()


def _write(target: Tensor, flags: Sequence[bool]) -> None:
    """Write flags as numbers, without a copy from the host where they are all alike."""
    if all(flags):
        target.fill_(1)
    elif not any(flags):
        target.zero_()
    else:
        target.copy_(torch.tensor(flags, dtype=target.dtype, device="cpu"))


def lay_out(parameters: Sequence[Named], bucket_bytes: int) -> list[Bucket]:
    """Distribute parameters over buckets of about ``bucket_bytes``, one dtype and device each.

    The last parameter comes first, since backward usually reaches it first; the first bucket is small, so that the
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
            key = (gradient_dtype(tensor).to_real() if tensor.is_complex() else gradient_dtype(tensor), tensor.device)
            bucket = filling.get(key)
            limit = FIRST_BUCKET_BYTES if bucket is not None and bucket.index == 0 else bucket_bytes
            if bucket is None or bucket.nbytes >= min(limit, bucket_bytes):
                bucket = filling[key] = Bucket(len(buckets), *key)
                buckets.append(bucket)
            bucket.add(named)
    if not buckets:
        buckets.append(Bucket(0, torch.float32, torch.device("cpu")))
    return buckets
