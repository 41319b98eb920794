"""Buckets: flat buffers in which many parameters' gradients are sent in one collective, and the slots of parameters.

A bucket's buffer contains, in this order::

    | gradient of slot 0 | slot 1 | … | used? (one number a slot) | touched? (one number a unit) | … | backward |

The numbers behind the gradients are its *tail*. They make unused parameters exact without an additional collective.
After the reduction, a slot's "used?" is not zero if any tower computed that gradient in this backward. It is the number
of such towers or, in shared memory and on accelerators, which average the tail as well, that number over N. In a
backward's last bucket, "touched?" shows which units (buckets and sparse gradients) any tower has gradients for, and the
last numbers identify the backward (:class:`towers.gradients.flags.Summary`). Between GPUs, tails are only read where
nothing else is known (:mod:`towers.gradients.flags`).

[Note: gradients are stored in buckets] When a backward is done, each gradient that any tower computed is a view of its
bucket (a tower's own gradient since the bucket was packed, or earlier; see below). So no gradient is copied out after
the sum. DDP's ``gradient_as_bucket_view`` does the same and saves a copy of all gradients per step. It breaks code that
keeps ``p.grad`` over ``zero_grad`` (methods that compare the gradients of several losses). So before a bucket is filled
again, the holders of its memory are counted: if there are others than the parameters themselves, the bucket gets new
memory. A parameter is given the same tensor in every backward, because a new one takes a tenth of a gradient's time on
the host. So the references to these tensors are counted, too. Their addresses and strides are compared, because
``Module.to`` and ``p.grad.data = …`` change them. Gradients are copied into ``view``, another tensor of that memory.

[Note: copied at once] CPU towers of one host compute on the cores that they reduce on, so overlap saves nothing, but
the cache saves much. A large gradient is copied into its bucket as soon as autograd has finished it, while the cache
holds it. The copy at once becomes the parameter's gradient, so that the next gradient is computed in the memory of the
last. (Through Gloo, the copy is multiplied by 1/N, so it becomes the gradient when the bucket is packed.) Small
gradients are copied together, in one call, when the bucket is packed. This happens when it is full; in a first
backward, and for the last bucket of every backward, when backward is done. On an accelerator, a kernel for each
gradient costs more than the cache saves. There, gradients are copied in one call when there are 4 MiB of them, which
limits the memory that they take in addition to the bucket.

[Note: slots without a new gradient] A slot without a new gradient contributes the gradient that the parameter
still has, not zero. That gradient is equal on all towers, so its mean is itself, up to rounding unless N is a power of
two. A second backward that only some towers run must result in old + mean(new); contributing zero would divide the old
gradient.

[Note: one bucket, several streams] Autograd computes a gradient on the stream on which the parameter's node was made.
That is another stream for a part of a model that was captured as a CUDA graph, so gradients of one bucket may arrive on
several streams. Each gradient is therefore ordered after the one before, and the bucket is packed on the stream of the
last. The memory of a gradient may be freed after the copy. If that gradient was computed on another stream than the
copy, it is recorded on the stream of the copy; otherwise, the allocator would reuse its memory too early. On CPUs, no
order is needed, and a bucket has no :class:`StreamOrder`.

[Note: keys are used again, one layout later] Shared memory has places for 4,096 keys, and a script that mirrors a copy
of its model in every step would use them up. Buckets are only laid out again after a collective. So when a tower makes
the next layout, all towers have released the keys that the previous layout released.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from towers.collectives.arithmetic import CHUNK_ALIGNMENT, chunk_numel
from towers.collectives.communicator import Communicator
from towers.errors import MirrorError, TowersError
from towers.gradients.flags import BITS, Read, Summary
from towers.gradients.sparse import has_rows, to_dense, without_rows
from towers.system.autograd_hooks import GradientHook
from towers.system.tensors import REFERENCES_OF_A_PARAMETER, Named, grad_dtype, gradient_dtype, on_device, view_like
from towers.system.torch_private import (
    DisableTorchFunctionSubclass,
    address_of_current_stream,
    current_stream_of,
    foreach_copy_,
    foreach_mul_,
    references,
    set_grad_enabled,
    storage_holders,
)

_device: Callable[[Any], torch.device] = operator.attrgetter("device")  # runs no code in Python
_NOTHING = torch.empty(0, dtype=torch.bool, device="cpu")  # no gradient is of this dtype
FIRST_BUCKET_BYTES = 2**20
_LARGE_BYTES = 2**17  # from this size on, copying a gradient at once saves more than one call for many gradients
WAITING_BYTES = 2**22
"""From this size on, gradients that have arrived are copied on an accelerator."""

_P = ParamSpec("_P")
_R = TypeVar("_R")


# -- slots ------------------------------------------------------------------------------------------------


def handles_gradients(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """Decorates methods that process gradients.

    Inside, autograd records nothing, and a lazily gathered gradient is plain memory.
    """

    @functools.wraps(method)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        records = torch.is_grad_enabled()
        set_grad_enabled(False)
        try:
            with DisableTorchFunctionSubclass():
                return method(*args, **kwargs)
        finally:
            set_grad_enabled(records)

    return wrapper


class Slot:
    """One parameter and the state of its gradient. It does not keep the parameter alive.

    Attributes:
        name, trainable: the parameter's (:class:`towers.system.tensors.Named`).
        parameter: returns the parameter when it is called, or None if its model is gone.
        shape, device: the parameter's when the slot was made.
        dtype: its gradient's.
        arrived: whether autograd has finished its gradient of this backward.
        unsynced: whether gradients of this tower alone were accumulated in it (``no_sync``).
        averaged: the number of the last average for which any tower had a gradient of it.
        hook: reports its gradients; None for a parameter of whole numbers.
    """

    __slots__ = (
        "arrived",
        "averaged",
        "device",
        "dtype",
        "hook",
        "name",
        "parameter",
        "shape",
        "trainable",
        "unsynced",
    )

    def __init__(self, named: Named) -> None:
        self.name = named.name
        self.trainable = named.trainable
        self.parameter = weakref.ref(named.tensor)
        self.shape, self.device = named.tensor.shape, named.tensor.device
        self.dtype = gradient_dtype(named.tensor)
        self.arrived = False
        self.unsynced = False
        self.averaged = 0
        self.hook: GradientHook | None = None

    @property
    def gradient(self) -> Tensor | None:
        """The parameter's gradient, or None."""
        return None if (parameter := self.parameter()) is None else parameter.grad

    @property
    def holds_unsynced(self) -> bool:
        """Whether there still is a gradient of this tower alone: ``zero_grad`` may have dropped it."""
        return self.unsynced and self.gradient is not None

    @property
    def fresh(self) -> bool:
        """Whether this tower has its own contribution."""
        return self.arrived or self.holds_unsynced


class DenseSlot(Slot):
    """One parameter's place in a bucket.

    Attributes:
        bucket, start: its position, in elements of the bucket's dtype.
        nbytes: the size of a dense gradient.
        is_large: whether CPU towers copy it at once.
        view: the part of the buffer for its gradient, in the parameter's shape and strides.
        given: another tensor of that part, which the parameter is given as its gradient.
        copied: the gradient that was copied before the bucket was packed, and its version then, by which a later change
            is detected.
    """

    __slots__ = ("bucket", "copied", "given", "is_large", "nbytes", "start", "view")

    def __init__(self, named: Named, bucket: Bucket, start: int) -> None:
        super().__init__(named)
        self.bucket = bucket
        self.start = start
        self.nbytes = named.tensor.nbytes
        self.is_large = self.nbytes >= _LARGE_BYTES
        self.view = self.given = _NOTHING
        self.copied: tuple[Tensor, int] | None = None

    @property
    def numel(self) -> int:
        """The number of its elements, of the bucket's dtype."""
        return self.shape.numel() * (2 if self.dtype.is_complex else 1)

    def install(self) -> None:
        """Makes this slot's place in the buffer the gradient of the parameter, if that still exists."""
        if (parameter := self.parameter()) is not None:
            parameter.grad = self.given

    def has_copied(self, gradient: Tensor) -> bool:
        """Returns whether ``gradient``, as it is now, was copied before the bucket was packed."""
        copied = self.copied
        return copied is not None and copied[0] is gradient and copied[1] == gradient._version


class SparseSlot(Slot):
    """A parameter with sparse gradients. Its rows are gathered, not reduced: only existing rows are sent."""

    __slots__ = ()

    def contribution(self, channel: Communicator) -> Tensor:
        """Returns this tower's contribution, which is zero if it has no gradient.

        It is sparse on all towers, for a reduction row by row, unless some tower's gradient is dense because the
        embedding is also used as an ordinary matrix. Then it is dense on all towers, and may be written to.
        """
        gradient = self.gradient
        if gradient is None:
            gradient = without_rows(self.shape, self.dtype, self.device)
        dense_somewhere = channel.all_gather(torch.tensor([0 if has_rows(gradient) else 1], device="cpu"))
        if not dense_somewhere.any():
            return gradient
        return to_dense(gradient) if gradient.is_sparse else gradient.clone(memory_format=torch.contiguous_format)

    def replace(self, gradient: Tensor) -> None:
        """Gives the parameter the reduced gradient."""
        if (parameter := self.parameter()) is not None:
            parameter.grad = gradient
        self.arrived = self.unsynced = False


# -- buckets ----------------------------------------------------------------------------------------------


class StreamOrder:
    """Orders writes into one bucket (see [Note: one bucket, several streams]).

    Args:
        device: the bucket's, an accelerator.

    Attributes:
        number_of, index: the function for a number that identifies the current stream, and its argument.
        number: its result at the previous write. As long as it stays the same, :meth:`advance` need not be called.
    """

    def __init__(self, device: torch.device) -> None:
        self.index = device.index
        self.number_of = address_of_current_stream(device.type) or (lambda index: current_stream_of(index).stream_id)
        self.number: int | None = None
        self._stream: torch.Stream | None = None
        self._several = False

    def advance(self) -> None:
        """Orders the current stream, on which a write happens now, after the stream of the previous write.

        If they are the same, it does nothing.
        """
        stream, before = current_stream_of(self.index), self._stream
        if before is not None and before != stream:
            stream.wait_stream(before)
            self._several = True
        self._stream, self.number = stream, self.number_of(self.index)

    def keep(self, gradients: Iterable[Tensor]) -> None:
        """Ensures that the memory of gradients that are dropped after their copy is not used again before the copy."""
        for gradient in gradients if self._several else ():
            if not gradient.is_sparse and gradient.device.type != "tpu":  # [Note: a TPU has one order], accelerator.py
                assert self._stream is not None
                gradient.record_stream(self._stream)

    def reset(self) -> None:
        """Forgets the streams of a backward that is over."""
        self._stream, self.number, self._several = None, None, False


class Bucket:
    """A flat buffer of gradients of one dtype and device. Complex numbers are sent as pairs of real ones.

    Attributes:
        index: its place among the buckets; collectives start in this order.
        key: its memory's (:meth:`Communicator.allocate`).
        numel: elements of the gradients, without the tail.
        units: the number of values in the tail that show which units were touched.
        missing: the number of gradients of this backward that are expected, and have not arrived. When it is zero,
            :meth:`count_missing` finds out whether more may arrive.
        waiting: on an accelerator, the bytes of those that have arrived since some were copied.
        is_packed: whether it was packed in this backward.
        flags: this tower's message to the others: for each slot, whether it had its own gradient; and in the last
            bucket of a backward, all of :class:`Summary`.
        buffer, tail: its memory, allocated once it is needed, and the part of it behind the gradients, which are padded
            to as many equal chunks as there are towers.
        streams: orders writes on an accelerator; None elsewhere.
    """

    def __init__(self, index: int, dtype: torch.dtype, device: torch.device) -> None:
        self.index = index
        self.key = index
        self.dtype = dtype
        self.device = device
        self.slots: list[DenseSlot] = []
        self.numel = 0
        self.units = 0
        self.missing = 0
        self._expected = 0  # gradients of this tower in the next backward, as in the last one
        self.waiting = 0
        self.is_packed = False
        self.flags: list[bool] = []
        self.buffer = self.tail = _NOTHING
        self.streams = StreamOrder(device) if device.type != "cpu" else None  # see [Note: one bucket, several streams]
        self._holders_checked = False
        self._packed: tuple[list[Tensor | None], int] = [], 0  # the gradients then, and the buffer's version
        self._given: list[Tensor] = []  # the slots'
        self._places = _places([])
        self._own = -1, 0  # the number of this object's tensors in the buffer, and of its references to those it gives
        self._sent: tuple[list[bool], Tensor] = [], _NOTHING  # the last flags, and the tail that an accelerator has

    def add(self, named: Named) -> None:
        """Assigns a parameter the next aligned place."""
        start = -(-self.numel // self.alignment) * self.alignment
        slot = DenseSlot(named, self, start)
        self.slots.append(slot)
        self.numel = start + slot.numel

    @property
    def alignment(self) -> int:
        """The number of elements of whose multiples slots start."""
        return CHUNK_ALIGNMENT // self.dtype.itemsize

    def padded_numel(self, towers: int) -> int:
        """Returns the elements of the gradients, padded to equal chunks, one for each tower."""
        return chunk_numel(self.numel, self.dtype.itemsize, towers) * towers

    @property
    def chunks(self) -> Tensor:
        """The part of the memory before the tail: equal chunks, one for each tower."""
        return self.buffer[: self.buffer.numel() - self.tail.numel()]

    def expect_gradients(self) -> None:
        """Expects, before a backward, as many gradients as in the last one."""
        self.missing = self._expected
        if not self.missing:
            self.count_missing()

    def count_missing(self) -> int:
        """Counts again how many gradients of this backward may still arrive, and returns that."""
        others = [slot.parameter() for slot in self.slots if not slot.arrived]
        self.missing = sum([parameter is not None and parameter.requires_grad for parameter in others])
        return self.missing

    def copy_in(self, slots: Sequence[DenseSlot], channel: Communicator, scale: float) -> None:
        """Copies gradients into the buffer before it is packed (see [Note: copied at once])."""
        self._check_holders(channel)
        self.waiting = 0
        gradients = [(slot, gradient) for slot in slots if (gradient := slot.gradient) is not None]
        copied = [(slot, gradient) for slot, gradient in gradients if gradient is not slot.given]
        if not copied:
            return
        sources = [gradient for _, gradient in copied]
        if self.streams is not None:
            self.streams.keep(sources)
        _copy([slot.view for slot, _ in copied], sources, scale)
        for slot, gradient in copied:
            if scale != 1.0:  # installed when packed: a second gradient of this backward would be added to the scaled
                slot.copied = gradient, gradient._version
            else:
                slot.install()

    def pack(self, channel: Communicator, scale: float, summary: Summary | None = None) -> None:
        """Copies all gradients, times ``scale``, and the flags into the buffer, which is then ready for the reduction.

        From here on, the gradients of fresh slots are in the buffer. A slot without any gradient contributes zero (see
        also [Note: slots without a new gradient]).

        Args:
            summary: for the last bucket of a backward.
        """
        if self._holders_checked and self._are_moved():  # a hook has set the data of a gradient since the check
            self._give_new_tensors()
        self._check_holders(channel)
        gradients = self._gradients()
        used = [s.arrived or (s.unsynced and g is not None) for s, g in zip(self.slots, gradients, strict=True)]
        outside = [
            (slot, gradient)
            for slot, gradient in zip(self.slots, gradients, strict=True)
            if gradient is not None and gradient is not slot.given
        ]
        if len(outside) < len(self.slots):
            self._pack_others(gradients, scale)
        to_copy = outside if scale == 1.0 else [(s, gradient) for s, gradient in outside if not s.has_copied(gradient)]
        sources, targets = [gradient for _, gradient in to_copy], [slot.view for slot, _ in to_copy]
        for slot, _ in outside:
            if (slot.arrived or slot.unsynced) and (parameter := slot.parameter()) is not None:
                parameter.grad = slot.given
        if scale != 1.0:
            for slot in self.slots:
                slot.copied = None
        self.flags = used if summary is None else [*used, *summary.flags()]
        if self.streams is not None:
            self.streams.keep(sources)
            sources.append(self._tail_on_device())
            targets.append(self.tail)
        else:
            self.tail[: len(self.flags)].copy_(torch.frombuffer(bytearray(self.flags), dtype=torch.uint8))
            self.tail[len(self.flags) :].zero_()
        if sources:
            _copy(targets, sources, scale)
        self.is_packed = True
        self._packed = self._gradients() if summary is None else [], self.buffer._version

    def _gradients(self) -> list[Tensor | None]:
        """Returns the gradient of each slot's parameter, or None."""
        return [None if (parameter := slot.parameter()) is None else parameter.grad for slot in self.slots]

    def _pack_others(self, gradients: Sequence[Tensor | None], scale: float) -> None:
        """Packs gradients that are in the buffer already, and zeros for those that do not exist."""
        for slot, gradient in zip(self.slots, gradients, strict=True):
            if gradient is None:
                slot.view.zero_()
            elif scale != 1.0 and gradient is slot.given:
                slot.view.mul_(scale)

    def _tail_on_device(self) -> Tensor:
        """Returns the tail with the flags. It is sent to the device only if they have changed."""
        if self._sent[0] != self.flags:
            numbers = torch.zeros(self.tail.shape, dtype=self.dtype, device="cpu")
            numbers[: len(self.flags)] = torch.tensor(self.flags, dtype=self.dtype, device="cpu")
            self._sent = self.flags, on_device(numbers, self.tail.device)
        return self._sent[1]

    def check_untouched(self, tower: int) -> None:
        """Checks, when backward is done, that the gradients are still the packed ones.

        Args:
            tower: this one, for messages.

        Raises:
            TowersError: the script has changed or replaced a gradient after it was packed.
        """
        gradients, version = self._packed
        pairs = zip(self.slots, gradients, strict=True)
        changed = [slot for slot, packed in pairs if (p := slot.parameter()) is not None and p.grad is not packed]
        if not changed and self.buffer._version != version:
            changed = self.slots
        if changed:
            names = ", ".join(slot.name for slot in changed[:3])
            one_of = "one of " if len(changed) > 1 else ""
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            raise TowersError(
                f"the gradient of {one_of}{names}{more} was changed on tower {tower} during backward(), after "
                "its exchange with the other towers had started. A hook may change the gradient of its own "
                "parameter only; change other gradients before backward(), or after it has returned"
            )

    def _check_holders(self, channel: Communicator) -> None:
        """Checks, once in a backward, that no other code holds the buffer's memory, which is about to be written to.

        See [Note: gradients are stored in buckets].
        """
        if self._holders_checked:
            return
        self._holders_checked = True
        if storage_holders(self.buffer) != self._own[0] or self._are_moved() or self._are_held_by_others():
            self._allocate(channel)

    def _give_new_tensors(self) -> None:
        """Makes the tensors that the parameters are given from now on."""
        for slot in self.slots:
            slot.given = slot.view.detach()
        self._given = [slot.given for slot in self.slots]

    def _are_moved(self) -> bool:
        """Returns whether the data of a given tensor has been set since, even to another part of the same memory.

        torch may also have moved the whole memory (``share_memory_()``, queues of torch.multiprocessing).
        """
        return _places(self._given) != self._places

    def _are_held_by_others(self) -> bool:
        """Returns whether other code than the slots' parameters holds some of the given tensors."""
        more = references(self._given) - self._own[1]
        return more > 0 and more != REFERENCES_OF_A_PARAMETER * sum(map(operator.is_, self._gradients(), self._given))

    @property
    def is_held(self) -> bool:
        """Whether any code holds some of the gradients that parameters were given."""
        return references(self._given) > self._own[1]

    def finish(self, read: Read, number: int, tower: int) -> None:
        """Gives parameters that only other towers used the reduced gradient, too, and forgets this backward.

        Args:
            read: returns the towers' counts of this bucket's flags.
            number: the backward's.
            tower: this one, for messages.

        Raises:
            MirrorError: a parameter is frozen on this tower, but not on another one.
        """
        self.is_packed = self._holders_checked = False
        self.waiting = 0
        self._packed = [], 0
        if self.streams is not None:
            self.streams.reset()
        self._expected = sum([slot.arrived for slot in self.slots])
        used = self.flags[: len(self.slots)]
        if all(used):
            for slot in self.slots:
                slot.arrived = slot.unsynced = False
                slot.averaged = number
            return
        for slot, used_here, count in zip(self.slots, used, read(), strict=False):  # the slots' flags are the first
            slot.arrived = slot.unsynced = False
            if count:
                slot.averaged = number
            if used_here or not count or (parameter := slot.parameter()) is None:
                continue
            if not parameter.requires_grad:
                raise MirrorError(
                    f"parameter {slot.name} is frozen (requires_grad is False) on tower {tower}, but another tower has "
                    "computed a gradient for it: freeze and thaw the same parameters on all towers"
                )
            if parameter.grad is not slot.given:
                slot.install()

    def _allocate(self, channel: Communicator) -> None:
        start = self.padded_numel(channel.size)
        numel = start + len(self.slots) + self.units + 1 + BITS
        self.buffer = channel.allocate(self.key, numel, self.dtype, self.device)
        self.tail = self.buffer[start:]
        for slot in self.slots:
            parameter = slot.parameter()
            slot.view = _NOTHING if parameter is None else view_like(parameter, self.buffer[slot.start :])
        self._give_new_tensors()
        self._places = _places(self._given)
        self._own = storage_holders(self.buffer), references(self._given)

    def drop_memory(self) -> None:
        """Drops the buffer of a bucket that is not used again.

        Buckets and slots refer to each other. Without this, the memory would be occupied until garbage is collected.
        """
        self.buffer = self.tail = _NOTHING
        self._packed, self._sent, self._given = ([], 0), ([], _NOTHING), []
        for slot in self.slots:
            slot.view, slot.given, slot.copied = _NOTHING, _NOTHING, None


def _places(tensors: list[Tensor]) -> tuple[list[int], list[tuple[int, ...]]]:
    """Returns the addresses and the strides of some tensors."""
    return list(map(Tensor.data_ptr, tensors)), list(map(Tensor.stride, tensors))


def _copy(targets: list[Tensor], gradients: list[Tensor], scale: float) -> None:
    """Copies gradients, times ``scale``, into places in buffers."""
    sources = [to_dense(gradient) if gradient.is_sparse else gradient for gradient in gradients]
    if scale == 1.0 or targets[0].device.type != "cpu":
        foreach_copy_(targets, sources)
        if scale != 1.0:
            foreach_mul_(targets, scale)
    else:  # in one pass over the memory
        for target, source in zip(targets, sources, strict=True):
            torch.mul(source, scale, out=target)


def distribute(parameters: Sequence[Named], bucket_bytes: int) -> list[Bucket]:
    """Distributes parameters over buckets of about ``bucket_bytes``, one dtype and device each.

    The last parameter is in the first bucket, because backward usually reaches it first. The first bucket is small, so
    that the first collective starts early. Parameters that were frozen from the start are in separate buckets, which
    cost nothing until a parameter is unfrozen. There is always at least one bucket.
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
            limit = min(FIRST_BUCKET_BYTES, bucket_bytes) if bucket is not None and not bucket.index else bucket_bytes
            if bucket is None or bucket.numel * bucket.dtype.itemsize >= limit:
                bucket = filling[key] = Bucket(len(buckets), *key)
                buckets.append(bucket)
            bucket.add(named)
    if not buckets:
        buckets.append(Bucket(0, torch.float32, torch.device("cpu")))
    return buckets


# -- all buckets of a model -------------------------------------------------------------------------------


class Keys:
    """Assigns keys of memory (:meth:`Communicator.allocate`): the same on towers that request them in one order.

    Args:
        channel: the owner of the memory. No other code allocates there.
    """

    def __init__(self, channel: Communicator) -> None:
        self._channel = channel
        self._next = 0
        self._free: list[int] = []
        self._released: list[int] = []

    def new(self) -> int:
        """Returns an unused key."""
        if self._free:
            return self._free.pop()
        self._next += 1
        return self._next - 1

    def release(self, key: int) -> None:
        """Takes back a key under which no memory is reduced any more."""
        self._channel.release(key)
        self._released.append(key)

    def recycle(self) -> None:
        """Makes released keys available again. All towers have run a collective since their release.

        See [Note: keys are used again, one layout later].
        """
        self._free += self._released
        self._released = []


class BucketLayout:
    """Slots for the gradients of some parameters. Dense gradients are in buckets, sparse ones are separate.

    Args:
        bucket_bytes: size of a bucket.

    Attributes:
        buckets: the buckets of the dense gradients.
        dense, sparse, slots: the slots of either kind, and all slots.
        units: the number of buckets and sparse gradients.
        trainable_units: for each unit, whether any of its parameters was trainable when it was laid out.
    """

    def __init__(self, parameters: Sequence[Named], bucket_bytes: int) -> None:
        self._names = [named.name for named in parameters]
        self.buckets: list[Bucket] = distribute([n for n in parameters if not n.sparse], bucket_bytes)
        self.dense: list[DenseSlot] = [slot for bucket in self.buckets for slot in bucket.slots]
        self.sparse = [SparseSlot(named) for named in parameters if named.sparse]
        self.slots: list[Slot] = [*self.dense, *self.sparse]
        self.units = len(self.buckets) + len(self.sparse)
        for bucket in self.buckets:
            bucket.units = self.units
        self.trainable_units = [any(slot.trainable for slot in bucket.slots) for bucket in self.buckets]
        self.trainable_units += [slot.trainable for slot in self.sparse]
        self._by_id = {id(slot.parameter()): slot for slot in self.slots}
        self._parameters = [slot.parameter for slot in self.slots]
        self._kinds = [slot.dtype for slot in self.slots], [slot.device for slot in self.slots]

    def trainable(self) -> tuple[int, ...]:
        """Returns the indices of the buckets that a first backward may have gradients for."""
        return tuple(bucket.index for bucket in self.buckets if self.trainable_units[bucket.index]) or (0,)

    def touched(self) -> list[bool]:
        """Returns for each unit whether this tower has its own contribution."""
        dense = [any(slot.fresh for slot in bucket.slots) for bucket in self.buckets]
        return dense + [slot.fresh for slot in self.sparse]

    def thawed(self, touched: Sequence[bool]) -> str | None:
        """Returns a parameter of a unit that is touched, but was not trainable when it was laid out; or None."""
        units = [bucket.slots for bucket in self.buckets] + [[slot] for slot in self.sparse]
        for slots, here, trainable in zip(units, touched, self.trainable_units, strict=True):
            if here and not trainable:
                return slots[0].name
        return None

    def slot_of(self, parameter: Tensor) -> Slot | None:
        """Returns a parameter's slot, or None."""
        slot = self._by_id.get(id(parameter))
        return slot if slot is not None and slot.parameter() is parameter else None

    def slots_of(self, parameters: Iterable[Tensor]) -> Iterator[Slot]:
        """Returns the slots of those parameters that have one."""
        return (slot for parameter in parameters if (slot := self.slot_of(parameter)) is not None)

    def converted(self) -> str | None:
        """Returns a parameter that was converted or moved since, with its present dtype and device; or None."""
        parameters = [parameter() for parameter in self._parameters]
        try:
            if (list(map(grad_dtype, parameters)), list(map(_device, parameters))) == self._kinds:
                return None
        except AttributeError:  # a parameter is gone
            pass
        for slot in self.slots:
            now = slot.parameter()
            if now is not None and (gradient_dtype(now) != slot.dtype or now.device != slot.device):
                return f"parameter {slot.name}, now {gradient_dtype(now)} on {now.device}"
        return None

    def kept(self, channel: Communicator) -> list[Named]:
        """Returns the parameters that still exist on any tower, in the order of their addition. All towers call it.

        A parameter that exists only on others (they keep a model that this tower has dropped) keeps its place here.
        """
        slots = {slot.name: slot for slot in self.slots}
        local = bytes(slots[name].parameter() is not None for name in self._names)
        everybody = channel.all_gather_bytes(local) if self._names else []
        kept = []
        for name, *alive in zip(self._names, *everybody, strict=True):
            slot = slots[name]
            if any(alive):
                tensor = slot.parameter()
                if tensor is None:
                    tensor = torch.empty(slot.shape, dtype=slot.dtype, device=channel.device)
                kept.append(Named(name, tensor, "parameter", slot.trainable, isinstance(slot, SparseSlot)))
        return kept

    def in_order_of(self, arrivals: Sequence[str], channel: Communicator) -> list[Named] | None:
        """Returns the parameters of :meth:`kept`, ordered so that buckets fill in the order of ``arrivals``.

        Returns None if they already have that order.

        Args:
            arrivals: names in the order in which gradients arrived, the same on all towers. Other parameters follow
                them.
        """
        places = {name: place for place, name in enumerate(arrivals)}
        names = sorted(self._names, key=lambda name: -places.get(name, len(places)))  # a layout starts with the last
        if names == self._names:
            return None
        kept = {named.name: named for named in self.kept(channel)}
        return [kept[name] for name in names if name in kept]
