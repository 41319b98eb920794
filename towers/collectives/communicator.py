"""Collectives: the interface that all ways of communicating implement."""

from __future__ import annotations

import functools
import json
import os
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from towers.collectives.arithmetic import add_by_tree
from towers.errors import ArgumentError, DisagreementError, ForkedError, TowersError, out_of_step
from towers.health.status import Health
from towers.options import DEFAULT_BUCKET_BYTES
from towers.system.memory_layout import contiguous

_C = TypeVar("_C", bound="Caller")
_P = ParamSpec("_P")
_R = TypeVar("_R")

_MESSAGE = 0x6D65 << 48  # what the lengths of messages begin with, and numbers of other collectives do not


class Shared(Protocol):
    """Something that several processes use together, and that a fork of one of them must not use."""

    def disown(self, error: ForkedError) -> None:
        """Raise ``error`` from now on, whatever is called: this process is a fork."""


_shared: weakref.WeakSet[Shared] = weakref.WeakSet()


def keep_from_forks(shared: Shared) -> None:
    """Refuse ``shared`` in forks of this process, where its use would put the towers out of step."""
    _shared.add(shared)


def _disown() -> None:
    for shared in list(_shared):
        shared.disown(
            ForkedError(
                "a collective (backward() of a mirrored model, reduce, gather, the next batch …) was called in a "
                "process that was forked from a tower, and is none itself. Call it in the process that made the "
                "strategy; here use copy.deepcopy(model)"
            )
        )


os.register_at_fork(after_in_child=_disown)


class Caller:
    """One tower as it makes a sequence of collectives, which it can break off.

    Attributes:
        index, size: this tower and how many there are.
    """

    index: int
    size: int
    _broken: TowersError | None = None

    @functools.cached_property
    def towers(self) -> Sequence[int]:
        """The numbers by which messages call these towers, which need not be all there are."""
        return range(self.size)

    def check_in_step(self) -> None:
        """Check that this tower is in step.

        Raises:
            TowersError: it broke off an earlier collective.
        """
        if self._broken is not None:
            raise type(self._broken)(*self._broken.args)

    def break_off(self, error: BaseException) -> None:
        """Break off a collective because of ``error``, and take part in none any more.

        Towers that share memory with it learn of it without waiting for the deadline.
        """
        if self._broken is None:
            self._broken = out_of_step(self.towers[self.index], error)

    def disown(self, error: ForkedError) -> None:
        """Take part in nothing from now on: this process is a fork."""
        self._broken = error


class InStep:
    """Encloses several collectives, or the stages of one: a tower that leaves by an exception is out of step for good.

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
    """:class:`InStep` around a method."""

    @functools.wraps(collective)
    def wrapper(self: _C, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        with InStep(self):
            return collective(self, *args, **kwargs)

    return wrapper


class Pending(Protocol):
    """A collective that was started and may still run."""

    def wait(self) -> None:
        """Return when the result is there (on a GPU: when later work of the current stream will see it)."""


class Deferred:
    """A collective that runs when it is awaited, by calling ``finish``."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self.wait = finish


class PeerGroup(Caller, ABC):
    """Towers that can tell each other anything, slowly perhaps: enough to form a communicator.

    Attributes:
        device: where the tensors of this tower's model live.
        name: tells this communicator from the others of a strategy, equal on all towers.
    """

    device: torch.device
    name: str = "all"
    _named: int = 0

    def next_name(self) -> str:
        """A name for one more communicator that is made from this one; all towers make the same, in the same order."""
        self._named += 1
        return f"{self.name}/{self._named}"

    @functools.cached_property
    def health(self) -> Health:
        """This tower's status, and its view of the others' when a collective does not end."""
        return Health()

    @abstractmethod
    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Every tower's ``data``, in tower order; lengths may differ. Takes CPU memory only."""

    def all_gather_json(self, value: Any) -> list[Any]:
        """Every tower's JSON value, as :meth:`all_gather_bytes` sends it."""
        return [json.loads(data) for data in self.all_gather_bytes(json.dumps(value).encode())]

    def close(self) -> None:
        """Leave the towers. Nothing may be called afterwards."""


class Communicator(PeerGroup):
    """Collectives over all towers. Every tower makes the same calls in the same order.

    Attributes:
        backend: name for messages and the log.
        prescale: what values have to be multiplied by before :meth:`submit_average`: 1 over the number of towers where
            the backend can only sum, else 1.
        may_overlap: whether averages may run beside the computation, in the order in which they were submitted; else
            they run all at once when the first is awaited.
        bucket_bytes: how large buckets of gradients are to be.

    Tensors must have one shape and dtype on all towers; where that is not certain, callers check it first
    (:mod:`towers.collectives.agreement`). Every wait has the deadline that the communicator was made with.
    """

    backend: str
    prescale: float = 1.0
    may_overlap: bool = True
    bucket_bytes: int = DEFAULT_BUCKET_BYTES

    @abstractmethod
    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        """Reduce ``tensor`` over all towers, in place. ``op``: sum, min, max or prod."""

    @abstractmethod
    def submit_average(self, tensor: Tensor) -> Pending:
        """Start or queue the average over all towers, in place.

        Leave ``tensor`` alone until :meth:`Pending.wait` returns. Gradients in it are already times :attr:`prescale`;
        what is not, such as a bucket's tail, is summed where the backend can only sum.
        """

    def allocate(self, key: int, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros, flat, where :meth:`submit_average` takes the least time.

        Args:
            key: tells such tensors apart; the same on all towers for what is reduced together. The one that was
                allocated last counts.
        """
        return torch.zeros(numel, dtype=dtype, device=device)

    def release(self, key: int) -> None:
        """Forget the memory under ``key``, which is not reduced again; it lives as long as its tensors."""

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> Tensor:
        """All towers' tensors, stacked in tower order: shape ``(size, *tensor.shape)``."""

    def start_all_gather(self, tensor: Tensor) -> tuple[Pending, Tensor]:
        """Start an :meth:`all_gather`: the rows are filled once it was awaited."""
        rows = self.all_gather(tensor)
        return Deferred(lambda: None), rows

    def all_to_all(self, rows: Tensor) -> Tensor:
        """Send row i to tower i; returns the rows received, in tower order: shape ``(size, *row)``."""
        return self.all_gather(rows)[:, self.index].contiguous()

    @in_step
    def sum_by_tree(self, tensors: Sequence[Tensor]) -> None:
        """Add up flat tensors over all towers, in place, in the order of :func:`add_by_tree`.

        It moves as many bytes as a ring, and the result does not depend on their way: tower i adds up the i-th chunk of
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
        """Overwrite ``tensor`` by tower ``source``'s."""

    @abstractmethod
    def channel(self) -> Communicator:
        """A second communicator of the same towers, whose collectives never meet this one's."""

    @in_step
    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Every tower's ``data``, in tower order; lengths may differ. Takes CPU memory only.

        One collective when all are at most 248 bytes long, else two.
        """
        short = 248
        header = (_MESSAGE + len(data)).to_bytes(8, sys.byteorder)
        packets = self.all_gather(from_bytes(header + data[:short].ljust(short, b"\0")))
        lengths = [int(row[:8].view(torch.int64)[0]) - _MESSAGE for row in packets]
        if not all(0 <= length < 1 << 40 for length in lengths):
            raise TowersError(f"another tower is in another collective than {self.towers[self.index]}")
        if max(lengths) > short:
            long = torch.zeros(max(lengths), dtype=torch.uint8, device="cpu")
            long[: len(data)] = from_bytes(data)
            return [row[:n].numpy().tobytes() for row, n in zip(self.all_gather(long), lengths, strict=True)]
        return [row[8 : 8 + n].numpy().tobytes() for row, n in zip(packets, lengths, strict=True)]

    def barrier(self) -> None:
        """Return when all towers have called it."""
        self.all_gather_bytes(b"")


def from_bytes(data: bytes) -> Tensor:
    """A copy of ``data`` as a flat tensor of bytes on the CPU."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor (a copy's of any other) as a flat tensor of bytes."""
    flat = contiguous(tensor).view(-1)
    if flat.numel() <= 1:  # counts as contiguous whatever its stride
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)


class Alone(Communicator):
    """One tower: every collective is the value itself."""

    def __init__(self, device: torch.device) -> None:
        self.index, self.size, self.device, self.backend = 0, 1, device, "no communication"

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        pass

    def submit_average(self, tensor: Tensor) -> Pending:
        return Deferred(lambda: None)

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.unsqueeze(0)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        pass

    def channel(self) -> Communicator:
        return self
