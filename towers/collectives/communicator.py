"""Collectives: the interface of all ways of communicating.

[Note: short messages] Towers that make the same call have the same description of it, so they only send a digest. Few
towers gather it, together with small values. With more towers, gathering takes too many messages, and so they reduce
the digest and its opposite with max: if all are equal, so are the maxima. Descriptions are gathered if they differ.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import struct
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from towers.collectives.arithmetic import add_by_tree
from towers.errors import ArgumentError, DisagreementError, ForkedError, TowersError, out_of_step
from towers.health.failure import leave_if_caught, note_out_of_step
from towers.health.status import Health
from towers.options import DEFAULT_BUCKET_BYTES
from towers.system.tensors import contiguous

_C = TypeVar("_C", bound="Caller")
_P = ParamSpec("_P")
_R = TypeVar("_R")

_MESSAGE = 0x6D65 << 48  # the high bits of messages' lengths, which numbers of other collectives do not have
_HEADER = struct.Struct("=qi12s")  # the length of a tower's own part, and the length and digest of the common part
_LENGTHS = struct.Struct("=qq")

INLINE = 128
"""Bytes of a tower's own part that are sent with the digest."""

FEW = 32
"""The largest number of towers that send short messages to all others, instead of reducing their digests."""


class Shared(Protocol):
    """An object that several processes use together, and that a fork of one of them must not use."""

    def disown(self, error: ForkedError, *, by_main_thread: bool) -> None:
        """Makes every call raise ``error`` from now on, because this process is a fork.

        Args:
            by_main_thread: whether the main thread has forked. Otherwise, it may have been in the middle of a call of
                C++, which has left tensors in any state.
        """


_shared: weakref.WeakSet[Shared] = weakref.WeakSet()


def keep_from_forks(shared: Shared) -> None:
    """Refuses ``shared`` in forks of this process, where its use would put the towers out of step."""
    _shared.add(shared)


_forked_by_main_thread = True


def _note_thread() -> None:
    global _forked_by_main_thread
    _forked_by_main_thread = threading.current_thread() is threading.main_thread()


def _disown() -> None:
    for shared in list(_shared):
        shared.disown(
            ForkedError(
                "a collective (backward() of a mirrored model, reduce, gather, the next batch …) was called in a "
                "process that was forked from a tower, and is none itself. Call it in the process that made the "
                "strategy; here use copy.deepcopy(model)"
            ),
            by_main_thread=_forked_by_main_thread,
        )


os.register_at_fork(before=_note_thread, after_in_child=_disown)


class Caller:
    """One tower as the caller of a sequence of collectives, which it can break off.

    Attributes:
        index, size: this tower's index and the number of towers.
    """

    index: int
    size: int
    _broken: TowersError | None = None

    @functools.cached_property
    def towers(self) -> Sequence[int]:
        """The numbers of these towers in messages. They may be a part of all towers."""
        return range(self.size)

    def check_in_step(self) -> None:
        """Checks that this tower is in step.

        Raises:
            TowersError: it broke off an earlier collective.
        """
        if self._broken is not None:
            leave_if_caught()
            raise type(self._broken)(*self._broken.args)

    def break_off(self, error: BaseException) -> None:
        """Breaks off a collective because of ``error``, and takes part in no further one.

        Towers that share memory with this one detect it without waiting for the deadline.
        """
        if self._broken is None:
            self._broken = out_of_step(self.towers[self.index], error)
            if self.size > 1:
                note_out_of_step(self.towers[self.index], error)

    def disown(self, error: ForkedError, *, by_main_thread: bool) -> None:
        """Takes part in no collective from now on, because this process is a fork."""
        self._broken = error


class InStep:
    """Encloses several collectives, or stages of one. A tower that leaves with an exception is out of step for good.

    Errors that all towers raise at the same stage (:class:`DisagreementError`, :class:`ArgumentError`) do no harm.
    """

    __slots__ = ("_target",)

    def __init__(self, target: Caller) -> None:
        self._target = target

    def __enter__(self) -> None:
        self._target.check_in_step()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, (DisagreementError, ArgumentError)):
            self._target.break_off(error)


def in_step(collective: Callable[Concatenate[_C, _P], _R]) -> Callable[Concatenate[_C, _P], _R]:
    """Wraps a method in :class:`InStep`."""

    @functools.wraps(collective)
    def wrapper(self: _C, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with InStep(self):
            return collective(self, *args, **kwargs)

    return wrapper


class Pending(Protocol):
    """A collective that was started and may still run."""

    def wait(self) -> None:
        """Waits until the result is available (on a GPU: to later work of the current stream)."""

    def is_done(self) -> bool:
        """Returns whether the host would not wait in :meth:`wait`."""


class Deferred:
    """A collective that runs when it is awaited, by calling ``finish``."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self.wait = finish

    def is_done(self) -> bool:
        return False


class Done:
    """A collective that has ended."""

    def wait(self) -> None:
        pass

    def is_done(self) -> bool:
        return True


class PeerGroup(Caller, ABC):
    """Towers that can send each other messages, perhaps slowly: enough to form a communicator.

    Attributes:
        device: the device of the tensors of this tower's model.
        name: distinguishes this communicator from the others of a strategy; equal on all towers.
    """

    device: torch.device
    name: str = "all"
    _named: int = 0

    def next_name(self) -> str:
        """Returns a name for another communicator made from this one. All towers call it in the same order."""
        self._named += 1
        return f"{self.name}/{self._named}"

    @functools.cached_property
    def health(self) -> Health:
        """This tower's status, and its view of the others' if a collective does not end."""
        return Health()

    @abstractmethod
    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Returns every tower's ``data``, in tower order; lengths may differ. It needs CPU memory only."""

    def all_gather_json(self, value: Any) -> list[Any]:
        """Returns every tower's JSON value, sent through :meth:`all_gather_bytes`."""
        return [json.loads(data) for data in self.all_gather_bytes(json.dumps(value).encode())]

    def close(self) -> None:
        """Leaves the towers. No method may be called afterwards."""


class Communicator(PeerGroup):
    """Collectives over all towers. Every tower makes the same calls in the same order.

    Tensors must have one shape and dtype on all towers. If that is not certain, callers check it first
    (:mod:`towers.collectives.agreement`). Every wait has the deadline with which the communicator was made.

    Attributes:
        backend: name for messages and the log.
        prescale: the factor for values before :meth:`submit_average`: 1 over the number of towers if the backend can
            only sum, otherwise 1.
        may_overlap: whether averages may run in parallel with the computation, in the order of submission. Otherwise
            they all run when the first is awaited.
        only_queues: whether hosts only queue collectives of the device's tensors, and do not wait for each other.
        bucket_bytes: the intended size of gradient buckets.
    """

    backend: str
    prescale: float = 1.0
    may_overlap: bool = True
    only_queues: bool = False
    bucket_bytes: int = DEFAULT_BUCKET_BYTES

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        """Reduces ``tensor`` over all towers, in place. ``op``: sum, min, max or prod."""

    @abstractmethod
    def submit_average(self, tensor: Tensor) -> Pending:
        """Starts or queues the average over all towers, in place.

        ``tensor`` must not be used until :meth:`Pending.wait` returns. Gradients in it are already multiplied by
        :attr:`prescale`. Other values, such as a bucket's tail, are summed if the backend can only sum.
        """

    def allocate(self, key: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns flat zeros, in memory where :meth:`submit_average` takes the least time.

        Args:
            key: distinguishes such tensors. Tensors that are reduced together have the same key on all towers. The
                newest allocation of a key counts.
        """
        return torch.zeros(numel, dtype=dtype, device=device)

    def release(self, key: int) -> None:
        """Forgets the memory under ``key``, which is not reduced again. The memory exists as long as its tensors."""

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Tensor:
        """Returns all towers' tensors, stacked in tower order: shape ``(size, *tensor.shape)``."""

    def start_all_gather(self, tensor: Tensor) -> tuple[Pending, Tensor]:
        """Starts an :meth:`all_gather`. The rows are filled once it has been awaited."""
        return Done(), self.all_gather(tensor)

    def start_all_sum(self, tensor: Tensor) -> Pending:
        """Starts an :meth:`all_reduce` with "sum", in place. ``tensor`` is the sum once it has been awaited."""
        self.all_reduce(tensor)
        return Done()

    def all_to_all(self, rows: Tensor) -> Tensor:
        """Sends row i to tower i, and returns the rows received, in tower order: shape ``(size, *row)``."""
        return self.all_gather(rows)[:, self.index].contiguous()

    @in_step
    def sum_by_tree(self, tensors: Sequence[Tensor]) -> None:
        """Sums flat tensors over all towers, in place, in the order of :func:`add_by_tree`.

        It moves as many bytes as a ring, and the result does not depend on their path: tower i sums the i-th chunk of
        each.
        """
        for tensor in tensors:
            length = -(-tensor.numel() // self.size)
            rows = tensor.new_zeros((self.size, length))
            rows.view(-1)[: tensor.numel()].copy_(tensor)
            received = self.all_to_all(rows)
            add_by_tree(received[0], list(received))
            tensor.copy_(self.all_gather(received[0]).view(-1)[: tensor.numel()])

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrites ``tensor`` with tower ``source``'s."""

    @abstractmethod
    def channel(self) -> Communicator:
        """Returns a second communicator of the same towers, whose collectives never mix with this one's."""

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Returns every tower's ``data``, in tower order; lengths may differ. It needs CPU memory only."""
        return [own for _, own in self.all_gather_messages(b"", data)]

    @property
    def are_few(self) -> bool:
        """Whether towers send short messages to all others; see [Note: short messages]."""
        return self.size <= FEW

    @in_step
    def all_gather_messages(self, common: bytes, own: bytes) -> list[tuple[bytes, bytes]]:
        """Returns every tower's message, in tower order: a part that usually is the same on all towers, and its own.

        If the common parts are the same, and the others at most :data:`INLINE` bytes long (empty with more than
        :data:`FEW` towers), it takes one collective, otherwise two; see [Note: short messages].
        """
        digest = hashlib.blake2b(common, digest_size=12).digest()
        if self.are_few:
            return self._gather_rows(common, own, digest)
        words = [int.from_bytes(digest[:6], "little"), int.from_bytes(digest[6:], "little")]
        found = torch.tensor([*words, *(-word for word in words), _MESSAGE, -_MESSAGE, len(common), len(own)])
        self.all_reduce(found, "max")
        first, second, first_opposite, second_opposite, kind, opposite, longest_common, longest = found.tolist()
        if (kind, opposite) != (_MESSAGE, -_MESSAGE):
            raise self._other_collective()
        if (first, second) != (-first_opposite, -second_opposite):
            return self._gather_packets(common, own, longest_common + longest)
        if longest:
            return [(common, each) for _, each in self._gather_packets(b"", own, longest)]
        return [(common, b"")] * self.size

    def _gather_rows(self, common: bytes, own: bytes, digest: bytes) -> list[tuple[bytes, bytes]]:
        row = _HEADER.pack(_MESSAGE + len(own), len(common), digest) + own[:INLINE].ljust(INLINE, b"\0")
        gathered = self.all_gather(from_bytes(row)).numpy().tobytes()
        rows = [gathered[at : at + len(row)] for at in range(0, len(gathered), len(row))]
        headers = [_HEADER.unpack_from(each) for each in rows]
        lengths = [number - _MESSAGE for number, _, _ in headers]
        if not all(0 <= length < 1 << 40 for length in lengths):
            raise self._other_collective()
        if all(header[1:] == headers[0][1:] for header in headers):
            if max(lengths) <= INLINE:
                at = _HEADER.size
                return [(common, each[at : at + length]) for each, length in zip(rows, lengths, strict=True)]
            return [(common, each) for _, each in self._gather_packets(b"", own, max(lengths))]
        longest = max(length + header[1] for length, header in zip(lengths, headers, strict=True))
        return self._gather_packets(common, own, longest)

    def _gather_packets(self, common: bytes, own: bytes, longest: int) -> list[tuple[bytes, bytes]]:
        """Returns all towers' messages.

        Args:
            longest: the largest length of one, at least.
        """
        packet = _LENGTHS.pack(len(common), len(own)) + common + own
        rows = self.all_gather(from_bytes(packet.ljust(_LENGTHS.size + longest, b"\0")))
        messages = []
        for row in rows:
            data = row.numpy().tobytes()
            first, second = _LENGTHS.unpack_from(data)
            middle = _LENGTHS.size + first
            messages.append((data[_LENGTHS.size : middle], data[middle : middle + second]))
        return messages

    def _other_collective(self) -> TowersError:
        return TowersError(f"another tower is in another collective than {self.towers[self.index]}")

    def barrier(self) -> None:
        """Waits until all towers have called it."""
        self.all_gather_bytes(b"")


def from_bytes(data: bytes) -> Tensor:
    """Returns a copy of ``data`` as a flat tensor of bytes on the CPU."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns the memory of a contiguous tensor, or of a contiguous copy of any other, as a flat tensor of bytes."""
    flat = contiguous(tensor).view(-1)
    if flat.numel() <= 1:  # counts as contiguous with any stride
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


class Alone(Communicator):
    """One tower: the result of every collective is the value itself."""

    backend = "no communication"

    def __init__(self, device: torch.device) -> None:
        self.index, self.size, self.device = 0, 1, device

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        pass

    def submit_average(self, tensor: Tensor) -> Pending:
        return Done()

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        pass

    def channel(self) -> Communicator:
        return self
