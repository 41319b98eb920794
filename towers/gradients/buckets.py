"""Buckets: flat buffers in which many parameters' gradients travel in one collective.

A bucket's buffer holds, one after the other::

    | gradient of slot 0 | slot 1 | … | used? (one number a slot) | touched? (one number a unit) | backward |

The numbers behind the gradients are its *tail*. They make unused parameters exact without a collective of their own:
after the sum over towers, a slot's "used?" says how many towers computed that gradient in this backward. In the bucket
that closes a backward "touched?" says which units (buckets and sparse gradients) any tower has gradients for, and the
last numbers say which backward it is (:mod:`towers.gradients.pairing`). Between GPUs these flags take another way
(:mod:`towers.gradients.usage`).

[Note: gradients lie in buckets] A parameter's gradient is a view of its bucket from the moment the bucket is packed, so
nothing is copied out after the sum. DDP's ``gradient_as_bucket_view`` does the same, saves a copy of all gradients a
step, and breaks code that keeps ``p.grad`` over ``zero_grad`` (methods that compare the gradients of several losses).
So before a bucket is filled again, the holders of its memory are counted: if there are others than the parameters
themselves, the bucket gets new memory. The slots' own views are never installed as gradients, since ``Module.to`` and
``p.grad.data = …`` would move them out of the bucket.

[Note: copied at once] On CPUs a tower computes on the core that it reduces on, so nothing is gained by overlap, but
much by the cache: a large gradient is copied into its bucket as soon as autograd has it, while the cache holds it, and
the copy at once becomes the parameter's gradient, so that the next gradient is computed in the memory of the last.
Small ones are copied together, in one call, when the bucket is full.

[Note: stale slots contribute what they hold] A slot without a new gradient contributes the gradient that the parameter
still has, not zero. That one is equal on all towers, so its mean is itself; a second backward that only some towers
make must give old + mean(new), and contributing zero would divide the old.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from towers.collectives.arithmetic import CHUNK_ALIGNMENT
from towers.collectives.communicator import Communicator
from towers.errors import MirrorError, TowersError
from towers.gradients.slots import Slot
from towers.gradients.sparse import to_dense
from towers.gradients.streams import StreamOrder
from towers.mirroring.mirror import Named
from towers.system.memory_layout import gradient_dtype, view_like
from towers.system.torch_private import foreach_copy_, storage_holders

_NOTHING = torch.empty(0, dtype=torch.bool, device="cpu")  # no gradient is of this dtype
FIRST_BUCKET_BYTES = 2**20
_LARGE_BYTES = 2**17  # from here on copying a gradient at once saves more than one call for many does


class DenseSlot(Slot):
    """One parameter's place in a bucket.

    Attributes:
        bucket, start: where it is, in elements of the bucket's dtype.
        view: where in the buffer its gradient lies, in the parameter's shape and strides.
        large: its gradient is copied into the buffer as soon as it is there (see [Note: copied at once]).
        copied: the gradient that was copied so, and its version then.
        packed: the parameter's gradient when its bucket was packed, until the backward is over.
        on_install: is told of each gradient that lies in the buffer and will be reduced there, if that leaves it
            incomplete.
    """

    __slots__ = ("bucket", "copied", "large", "on_install", "packed", "start", "view")

    def __init__(self, named: Named, bucket: Bucket, start: int) -> None:
        super().__init__(named)
        self.bucket = bucket
        self.start = start
        self.large = named.tensor.nbytes >= _LARGE_BYTES
        self.view = _NOTHING
        self.copied: tuple[Tensor, int] | None = None
        self.packed: Tensor | None = None
        self.on_install: Callable[[DenseSlot, Tensor], None] | None = None

    @property
    def numel(self) -> int:
        """Elements of the bucket's dtype."""
        return self.shape.numel() * (2 if self.dtype.is_complex else 1)

    def is_installed(self, gradient: Tensor | None) -> bool:
        """Whether ``gradient`` is this slot's place in the buffer."""
        view = self.view
        if gradient is None or gradient.is_sparse or gradient.data_ptr() != view.data_ptr():
            return False
        return gradient.stride() == view.stride() and gradient.dtype == view.dtype

    def install(self, parameter: Tensor) -> None:
        """Make this slot's place in the buffer the parameter's gradient."""
        parameter.grad = gradient = self.view.detach()
        if self.on_install is not None:
            self.on_install(self, gradient)

    def copy(self, gradient: Tensor, scale: float) -> None:
        """Copy ``gradient`` times ``scale`` into the buffer."""
        dense = to_dense(gradient) if gradient.is_sparse else gradient
        if scale == 1.0:
            self.view.copy_(dense)
        else:
            torch.mul(dense, scale, out=self.view)


class Bucket:
    """A flat buffer of gradients of one dtype and device. Complex numbers travel as pairs of real ones.

    Attributes:
        index: its place among the buckets; collectives start in this order.
        key: of its memory, as of :meth:`Communicator.allocate`.
        numel: elements of the gradients, without the tail.
        closing: how many numbers follow in the tail after one for each slot.
        missing: how many gradients of this backward have not arrived.
        launched: it was packed in this backward.
        used: which slots had a gradient of this tower's own when it was packed.
        buffer, tail: its memory, allocated once it is needed, and the part behind the gradients.
        streams: orders what comes on an accelerator; None elsewhere.
    """

    def __init__(self, index: int, dtype: torch.dtype, device: torch.device) -> None:
        self.index = index
        self.key = index
        self.dtype = dtype
        self.device = device
        self.slots: list[DenseSlot] = []
        self.numel = 0
        self.closing = 0
        self.missing = 0
        self.launched = False
        self.used: list[bool] = []
        self.buffer = self.tail = _NOTHING
        self.streams = StreamOrder(device) if device.type != "cpu" else None  # see [Note: one bucket, several streams]
        self._ready = False
        self._holders = 0
        self._address = -1
        self._version = 0

    def add(self, named: Named) -> None:
        """Give a parameter the next aligned place."""
        start = -(-self.numel // self.alignment) * self.alignment
        slot = DenseSlot(named, self, start)
        self.slots.append(slot)
        self.numel = start + slot.numel

    @property
    def alignment(self) -> int:
        """Slots begin at multiples of so many elements."""
        return CHUNK_ALIGNMENT // self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def reset(self) -> None:
        """After a backward: nothing has arrived, nothing is unsynced."""
        self.launched = self._ready = False
        if self.streams is not None:
            self.streams.reset()
        for slot in self.slots:
            slot.arrived = slot.unsynced = False
            slot.copied = slot.packed = None

    def count_missing(self) -> None:
        """Before a backward: how many gradients may arrive."""
        parameters = (slot.parameter for slot in self.slots)
        self.missing = sum(parameter is not None and parameter.requires_grad for parameter in parameters)

    def copy_in(self, slot: DenseSlot, channel: Communicator, scale: float) -> None:
        """Copy a gradient that autograd has just finished into the buffer (see [Note: copied at once])."""
        self._make_ready(channel)
        parameter = slot.parameter
        gradient = None if parameter is None else parameter.grad
        if parameter is None or gradient is None or slot.is_installed(gradient):
            return
        slot.copy(gradient, scale)
        if scale == 1.0:
            slot.install(parameter)
        else:  # a second gradient of this backward would be added to the scaled first: it is installed when packed
            slot.copied = gradient, gradient._version

    def pack(
        self, channel: Communicator, scale: float, closing: Sequence[bool] | None = None, *, tail: bool = True
    ) -> None:
        """Copy all gradients, times ``scale``, and the tail into the buffer; it is ready to be reduced.

        From here on the gradients of fresh slots lie in the buffer. A slot without any gradient contributes zero (and
        see [Note: stale slots contribute what they hold]).

        Args:
            closing: for the bucket that closes a backward: which units this tower touched, and which backward it is.
            tail: whether flags travel in the tail.
        """
        self._make_ready(channel)
        used = []
        sources: list[Tensor] = []
        targets: list[Tensor] = []
        for slot in self.slots:
            parameter, fresh = slot.parameter, slot.fresh
            gradient = None if parameter is None else parameter.grad
            used.append(fresh)
            if parameter is None or gradient is None:
                slot.view.zero_()
            elif (copied := slot.copied) is not None and copied[0] is gradient and copied[1] == gradient._version:
                slot.install(parameter)  # it was copied at once, and nobody has changed it since
            elif slot.is_installed(gradient):
                if scale != 1.0:
                    slot.view.mul_(scale)
                if slot.on_install is not None:
                    slot.on_install(slot, gradient)
            else:
                if self.streams is not None and not gradient.is_sparse:
                    self.streams.keep(gradient)
                if scale == 1.0 and not gradient.is_sparse:
                    sources.append(gradient)
                    targets.append(slot.view)
                else:
                    slot.copy(gradient, scale)
                if fresh:
                    slot.install(parameter)
            slot.copied = None
            slot.packed = None if parameter is None else parameter.grad
        if sources:
            foreach_copy_(targets, sources)  # many small ones in one call
        self.used = used
        if tail:
            _write(self.tail[: len(used)], used)
            _write(self.tail[len(used) :], closing or [False] * self.closing)
        self.launched = True
        self._version = self.buffer._version

    def check_untouched(self, tower: int) -> None:
        """When backward is done: see that the gradients are those that were packed.

        Args:
            tower: this one, for messages.

        Raises:
            TowersError: the script has changed or replaced one meanwhile.
        """
        changed = [s for s in self.slots if (p := s.parameter) is not None and p.grad is not s.packed]
        if not changed and self.buffer._version != self._version:
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

    def _make_ready(self, channel: Communicator) -> None:
        """Once in a backward, before the buffer is written to: see that nobody else holds its memory.

        See [Note: gradients lie in buckets].
        """
        if self._ready:
            return
        self._ready = True
        gradients = [None if (parameter := slot.parameter) is None else parameter.grad for slot in self.slots]
        ours = sum(slot.is_installed(gradient) for slot, gradient in zip(self.slots, gradients, strict=True))
        # torch may have moved the memory of all views at once (``share_memory_()``, queues of torch.multiprocessing).
        moved = self.buffer.data_ptr() != self._address
        if moved or storage_holders(self.buffer) > self._holders + ours:
            self._allocate(channel)

    def settle(self, tail: Callable[[], Tensor], number: int, tower: int) -> None:
        """After the reduction: parameters that only other towers used get their gradient too.

        Args:
            tail: gives the sum of all towers' tails; asking for it may make the host wait.
            number: of this backward.
            tower: this one, for messages.

        Raises:
            MirrorError: a parameter is frozen on this tower and not on another one.
        """
        for slot, used in zip(self.slots, self.used, strict=True):
            if used:
                slot.averaged = number
        if all(self.used):
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
            if not slot.is_installed(parameter.grad):
                slot.install(parameter)

    def _allocate(self, channel: Communicator) -> None:
        numel = self.numel + len(self.slots) + self.closing
        self.buffer = channel.allocate(self.key, numel, self.dtype, self.device)
        self.tail = self.buffer[self.numel :]
        for slot in self.slots:
            parameter = slot.parameter
            slot.view = _NOTHING if parameter is None else view_like(parameter, self.buffer[slot.start :])
        self._holders = storage_holders(self.buffer)
        self._address = self.buffer.data_ptr()


def _write(target: Tensor, flags: Sequence[bool]) -> None:
    """Write flags as numbers, without a copy from the host where they are all alike."""
    if all(flags):
        target.fill_(1)
    elif not any(flags):
        target.zero_()
    else:
        target.copy_(torch.tensor(flags, dtype=target.dtype, device="cpu"))


def distribute(parameters: Sequence[Named], bucket_bytes: int) -> list[Bucket]:
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
