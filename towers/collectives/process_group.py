"""Collectives through torch.distributed (c10d): NCCL between NVIDIA's GPUs, Gloo between CPUs.

Between other accelerators, torch's backend for their kind is used.

[Note: groups end before the interpreter] Gloo's threads free the last collective's tensors and need the interpreter for
it. A process that ended right after a collective was aborted in 8 of 12 runs (torch 2.13). Destroying the groups at
exit joins the threads. With NCCL, that waits for all towers, even for one that is gone or still busy, and for CUDA
graphs that contain collectives. So do its destructors. Therefore, with NCCL, a process that has not left after a minute
(after a failure: a second) ends at once, and skips the rest of the interpreter's end.

[Note: a group exists when all towers have it] Of two towers that Gloo connects, one is done as soon as the other's port
has accepted its connection. If it then leaves the group, the other one, which still forms it, fails with
"connectFullMesh … closed by peer". So a group starts with a barrier. For the default group, that is a strategy's first
collective.

[Note: connections on first use] Gloo would connect every pair of towers when a group is formed: with 96 towers, each
has 95 connections, and forming takes 1.9 s on two cores. With :data:`LAZY`, two towers connect when a collective needs
it (after a barrier, 9 connections each), and forming takes 0.7 s.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from towers.collectives import nccl
from towers.collectives.communicator import Communicator, Pending, keep_from_forks
from towers.health.failure import is_peer_lost, leave, leave_if_out_of_step
from towers.health.status import Wait
from towers.health.timeout_messages import connection_lost, timeout_error
from towers.options import GLOO_BUCKET_BYTES
from towers.system.messages import get_logger
from towers.system.torch_private import backend_of, count_of_groups

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "prod": dist.ReduceOp.PRODUCT,
}

LAZY = "TORCH_GLOO_LAZY_INIT"
"""Environment variable: whether Gloo connects two ranks on first use."""

COMPLETE = {"nccl"}
"""Backends that divide while they sum, and whose output may be a part of the input."""

_MOMENT = timedelta(seconds=0.5)  # between two checks whether a collective can still end

_LEAVING_SECONDS = 60.0

log = get_logger("towers")

# The second names are those of older versions of torch, deprecated in 2.13.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class ProcessGroupCommunicator(Communicator):
    """Collectives of one c10d process group.

    Attributes:
        count: the number of collectives that this tower has started.
        may_scatter: whether :meth:`submit_chunk_average` and :meth:`gather_chunks` can be called.
    """

    def __init__(
        self, group: Any, device: torch.device, backend: str, timeout: timedelta, wire_dtype: str = "same"
    ) -> None:
        self.index = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.device = device
        self.backend = backend
        complete = backend in COMPLETE
        self._average = dist.ReduceOp(dist.ReduceOp.AVG if complete else dist.ReduceOp.SUM)
        self._averaging = dist.AllreduceOptions()
        self._averaging.reduceOp, self._averaging.asyncOp = self._average, True
        self.prescale = 1.0 if complete else 1.0 / self.size
        self.may_scatter = complete and wire_dtype == "same"
        self.only_queues = device.type != "cpu" and backend != "gloo"
        if backend == "gloo":
            self.bucket_bytes = GLOO_BUCKET_BYTES
        self._group: Any = group
        self._timeout = timeout
        self._wire_dtype = wire_dtype
        self.count = 0
        open_communicators.add(self)
        if backend == "gloo" and group is not dist.group.WORLD:
            weakref.finalize(self, _unused.append, group).atexit = False
        keep_from_forks(self)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        self._do(tensor, functools.partial(dist.all_reduce, tensor, op=_OPERATIONS[op]))

    def submit_average(self, tensor: Tensor) -> Pending:
        narrow = self._wire_dtype == "bfloat16" and tensor.dtype == torch.float32
        sent = tensor.bfloat16() if narrow else tensor
        group = self._begin()
        with _Explained(self):
            work = group.allreduce([sent], self._averaging)  # without the checks of dist.all_reduce, which take 10 µs
        return _Started(self, work, self.count, tensor, sent)

    def submit_chunk_average(self, buffer: Tensor) -> Pending:
        """Starts the average over all towers of this tower's chunk of a flat buffer, in place.

        The other chunks stay this tower's own.

        Args:
            buffer: as many equal chunks as there are towers.
        """
        group = self._begin()
        with _Explained(self):
            chunk = buffer.chunk(self.size)[self.index]
            work = _reduce_scatter_single(chunk, buffer, self._average, group, async_op=True)
        return _Started(self, work, self.count, buffer, buffer)

    def gather_chunks(self, buffer: Tensor) -> None:
        """Sends each tower's chunk of a flat buffer to all towers, in place."""
        chunk = buffer.chunk(self.size)[self.index]
        self._do(buffer, functools.partial(_all_gather_single, buffer, chunk))

    def all_gather(self, tensor: Tensor) -> Tensor:
        rows, gather = self._gather(tensor)
        self._do(tensor, gather)
        return rows

    def start_all_gather(self, tensor: Tensor) -> tuple[Pending, Tensor]:
        rows, gather = self._gather(tensor)
        group = self._begin()
        with _Explained(self):
            work = gather(group=group, async_op=True)
        return _Started(self, work, self.count, tensor, tensor), rows

    def start_all_sum(self, tensor: Tensor) -> Pending:
        group = self._begin()
        with _Explained(self):
            work = dist.all_reduce(tensor, group=group, async_op=True)
        return _Started(self, work, self.count, tensor, tensor)

    def _gather(self, tensor: Tensor) -> tuple[Tensor, Callable[..., Any]]:
        """Returns memory for all towers' rows, and the collective that fills it."""
        rows = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        if tensor.device.type != "cpu" and self.backend != "gloo":
            # For a list, c10d allocates one tensor on the device, and copies its rows; Gloo needs a list.
            return rows, functools.partial(_all_gather_single, rows.view(-1), tensor.contiguous().view(-1))
        return rows, functools.partial(dist.all_gather, list(rows.unbind(0)), tensor)

    def all_to_all(self, rows: Tensor) -> Tensor:
        received = torch.empty_like(rows, memory_format=torch.contiguous_format)
        self._do(rows, functools.partial(dist.all_to_all_single, received, rows.contiguous()))
        return received

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        self._do(tensor, functools.partial(dist.broadcast, tensor, group_src=source))

    def gather_parts(self, whole: Tensor, part: Tensor, phase: str, *, async_op: bool) -> Any:
        """Gathers all towers' parts of a flat tensor, for a library.

        Args:
            phase: the phase in which a host waits.
            async_op: whether to return c10d's work, instead of waiting for it.
        """
        return self._for_library(whole, functools.partial(_all_gather_single, whole, part), phase, async_op)

    def reduce_parts(self, part: Tensor, whole: Tensor, op: Any, phase: str, *, async_op: bool) -> Any:
        """Reduces each tower's part of a flat tensor over all towers, for a library; see :meth:`gather_parts`."""
        if self.backend == "gloo" and op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG) and not async_op:
            # Gloo's own would reduce all parts on all towers, and a wait for it has no deadline.
            parts = torch.empty_like(whole)
            self._for_library(whole, functools.partial(dist.all_to_all_single, parts, whole), phase, async_op)
            torch.sum(parts.view(self.size, -1), 0, out=part.view(-1))
            if op == dist.ReduceOp.AVG:
                part /= self.size
            return None
        return self._for_library(whole, functools.partial(_reduce_scatter_single, part, whole, op), phase, async_op)

    def _for_library(self, tensor: Tensor, collective: Callable[..., Any], phase: str, async_op: bool) -> Any:
        if not async_op and tensor.device.type == "cpu":
            with self.health.during(phase):
                self._do(tensor, collective)
            return None
        group = self._begin()
        with _Explained(self):
            return collective(group=group, async_op=async_op)

    def _begin(self) -> Any:
        """Counts one more collective of this tower, and returns c10d's group."""
        self.check_in_step()
        self.count += 1
        return self._group

    def _do(self, tensor: Tensor, collective: Callable[..., Any]) -> None:
        """Runs a collective to its end."""
        group = self._begin()
        if tensor.device.type != "cpu":
            with _Explained(self):
                collective(group=group)
        else:
            with _Explained(self):
                work = collective(group=group, async_op=True)
            self.wait_for(work, self.count)

    def wait_for(self, work: Any, number: int) -> None:
        """Waits until a collective on the CPU is done.

        Args:
            number: the collective's.

        Raises:
            CollectiveTimeoutError, PeerLostError, DeadlockError: it cannot end.
        """
        with _Explained(self):
            while not self._is_done(work):
                self.health.waits = Wait(self.name, number, self.towers)
                self.health.check_deadlock()
            self.health.waits = None

    @staticmethod
    def _is_done(work: Any) -> bool:
        """Returns whether the collective is done after a short wait."""
        try:
            work.wait(_MOMENT)
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait(_MOMENT)  # raises the failure again; or it was done just after the first wait
        return True

    def raise_explained(self, error: RuntimeError) -> None:
        """Raises an error with an explanation, if ``error`` is a backend's time-out or lost connection."""
        self.health.waits = None
        me = self.towers[self.index]
        if "timed out" in str(error).lower():
            raise timeout_error(self.health, me, self._timeout.total_seconds()) from None
        if is_peer_lost(error):
            raise connection_lost(self.health, me, error) from error

    def channel(self) -> ProcessGroupCommunicator:
        return self._with(new_group(self.backend, self._timeout), self.next_name(), self.towers)

    def among(self, parts: Sequence[Sequence[int]]) -> ProcessGroupCommunicator | None:
        """Returns a communicator of the part that this tower is in, or None if it is in none.

        All towers call this, but only the towers of a part make its group, if c10d gives it one name on all of them:
        the name contains the number of groups that a process has.

        Args:
            parts: towers in ascending order, each in at most one part.
        """
        counts = self.all_gather_bytes(str(count_of_groups()).encode())
        alone = all(len({counts[tower] for tower in part}) == 1 for part in parts)
        own: tuple[Any, str, Sequence[int]] | None = None
        for part in parts:
            name = self.next_name()
            if self.index in part or not alone:
                group = new_group(self.backend, self._timeout, list(part), alone=alone)
                own = (group, name, part) if self.index in part else own
        if own is None:
            return None
        group, name, part = own
        return self._with(group, name, [self.towers[tower] for tower in part])

    def _with(self, group: Any, name: str, towers: Sequence[int]) -> ProcessGroupCommunicator:
        other = ProcessGroupCommunicator(group, self.device, self.backend, self._timeout, self._wire_dtype)
        other.health = self.health
        other.health.watch(other)
        other.name, other.towers = name, towers
        other.barrier()  # see [Note: a group exists when all towers have it]
        return other

    def close(self) -> None:
        self._group = None

    def failure(self) -> Exception | None:
        """Returns an error that NCCL has found while no host was waiting for a collective, or None."""
        group = self._group
        if self.backend != "nccl" or group is None:
            return None
        status = backend_of(group, self.device).get_error().name
        if status == "SUCCESS":
            return None
        me = self.towers[self.index]
        if status == "TIMEOUT":
            return timeout_error(self.health, me, self._timeout.total_seconds())
        return connection_lost(self.health, me, RuntimeError(f"NCCL: {status}"))


class _Explained:
    """Explains a communicator's errors within it. A generator as a context manager would take three times as long."""

    __slots__ = ("_communicator",)

    def __init__(self, communicator: ProcessGroupCommunicator) -> None:
        self._communicator = communicator

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, RuntimeError):
            self._communicator.raise_explained(error)


class _Started:
    """A collective that was started for ``tensor``, and transmits ``sent``."""

    def __init__(
        self, communicator: ProcessGroupCommunicator, work: Any, number: int, tensor: Tensor, sent: Tensor
    ) -> None:
        self._communicator = communicator
        self._work, self._number = work, number
        self._tensor, self._sent = tensor, sent

    def wait(self) -> None:
        if self._sent.device.type != "cpu":
            with _Explained(self._communicator):
                self._work.wait()
        else:
            self._communicator.wait_for(self._work, self._number)
        if self._sent is not self._tensor:
            self._tensor.copy_(self._sent)

    def is_done(self) -> bool:
        return self._sent.device.type != "cpu" or self._work.is_completed()


open_communicators: weakref.WeakSet[ProcessGroupCommunicator] = weakref.WeakSet()
"""Communicators that hold a group. A group is only really destroyed after they have released it."""


_unused: list[Any] = []
"""Groups whose communicators are gone. c10d keeps them, with connections and threads, until they are destroyed."""


def failures() -> Iterator[Exception | None]:
    """Yields the error that NCCL has found in each group, or None (:mod:`towers.collectives.nccl`)."""
    try:
        communicators = list(open_communicators)
    except RuntimeError:  # one was added during the iteration
        return
    for communicator in communicators:
        yield communicator.failure()


def backends(backend: str) -> str:
    """Returns the backends to request from c10d: an accelerator's own, and Gloo for messages between hosts' CPUs."""
    return backend if backend == "gloo" else f"cpu:gloo,{dist.Backend.backend_capability[backend][0]}:{backend}"


def join_default_group(
    store: dist.Store,
    index: int,
    size: int,
    device: torch.device,
    backend: str,
    timeout: timedelta,
    wire_dtype: str,
) -> ProcessGroupCommunicator:
    """Returns a communicator over c10d's default group, which all towers make together, and leave when they end."""
    with forming(backend):
        dist.init_process_group(
            backends(backend),
            store=store,
            rank=index,
            world_size=size,
            timeout=timeout,
            device_id=device if backend == "nccl" else None,
        )
    leave_at_exit(may_hang=backend != "gloo")
    return ProcessGroupCommunicator(dist.group.WORLD, device, backend, timeout, wire_dtype)


def new_group(backend: str, timeout: timedelta, ranks: list[int] | None = None, *, alone: bool = False) -> Any:
    """Returns another c10d group, of ``ranks`` or of all ranks.

    All ranks of the default group call this, or with ``alone`` only those of the new one.

    Unused groups are destroyed here, not where their communicators are collected: garbage is collected at any time,
    even during c10d's own calls.
    """
    while _unused:
        dist.destroy_process_group(_unused.pop())
    with forming(backend):
        return dist.new_group(
            ranks, timeout, backends(backend), use_local_synchronization=alone, group_desc="of mirrored"
        )


def communicator_over(group: Any, like: Communicator, timeout: timedelta) -> ProcessGroupCommunicator:
    """Returns a communicator over a group that a library has made. All towers make the same calls in the same order.

    Args:
        group: of some towers, among them this one.
        like: a communicator of all towers.
    """
    backend = "gloo" if like.device.type == "cpu" else dist.get_backend(group)
    communicator = ProcessGroupCommunicator(group, like.device, backend, timeout)
    communicator.health = like.health
    communicator.name, communicator.towers = like.next_name(), dist.get_process_group_ranks(group)
    communicator.health.watch(communicator)
    communicator.barrier()  # see [Note: a group exists when all towers have it]
    return communicator


def group_of_thread(owner: object) -> Any:
    """Returns a c10d group of all ranks' CPUs, for the collectives of one other thread. All ranks must call it.

    Its collectives wait for a day, because they may wait for disks. A peer that has ended makes them fail.

    Args:
        owner: the group is no longer needed when this object is collected.
    """
    group = new_group("gloo", timedelta(days=1))
    weakref.finalize(owner, _unused.append, group).atexit = False
    dist.barrier(group)  # see [Note: a group exists when all towers have it]
    return group


@contextlib.contextmanager
def forming(backend: str) -> Iterator[None]:
    """Forms a group inside, see [Note: connections on first use]."""
    os.environ.setdefault(LAZY, "1")
    with without_greeting(), nccl.without_abort() if backend == "nccl" else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def without_greeting() -> Iterator[None]:
    """Keeps standard output clean while groups are made: Gloo of torch 2.9 prints its connections there.

    If NCCL_DEBUG is set, so that NCCL prints, no output is suppressed.
    """
    if os.environ.get("NCCL_DEBUG"):
        yield
        return
    sys.stdout.flush()
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def leave_at_exit(*, may_hang: bool) -> None:
    """Destroys the groups before the interpreter is finalized; see [Note: groups end before the interpreter].

    Args:
        may_hang: whether NCCL is used.
    """
    exit_code_of_script = _remember_exit_code() if may_hang else lambda: 0
    ending = threading.Event()

    def leave_when_ending() -> None:
        ending.wait()
        leave_process_group()

    # Started now, because some versions of Python (3.12.0 to 3.12.2) start no threads at exit.
    leaving = threading.Thread(target=leave_when_ending, name="towers-leave", daemon=True)
    leaving.start()

    def at_exit() -> None:
        error = getattr(sys, "last_value", None)  # its report has already been written
        announced = max((communicator.health.exit_code for communicator in list(open_communicators)), default=0)
        ending.set()
        leaving.join(1.0 if error is not None else _LEAVING_SECONDS if may_hang else None)
        if not leaving.is_alive():
            log.debug("this tower has left its process groups")
        if not leaving.is_alive() or not may_hang:
            return
        leave_if_out_of_step()
        logging.shutdown()
        if error is None:
            log.warning(
                "the process groups could not be destroyed within %.0f s: another tower has not ended yet, or there is "
                "a CUDA graph that holds collectives (delete it before the program ends); ending without it",
                _LEAVING_SECONDS,
            )
            leave(announced or exit_code_of_script())
        leave(128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1)

    atexit.register(at_exit)


def _remember_exit_code() -> Callable[[], int]:
    """Records the argument of ``sys.exit`` from now on, and returns a function for the resulting exit code."""
    status: Any = None
    leave_by = sys.exit

    @functools.wraps(leave_by)
    def remember(code: Any = None, /) -> NoReturn:
        nonlocal status
        status = code
        leave_by(code)

    sys.exit = remember  # the interpreter does not expose a SystemExit
    return lambda: status if isinstance(status, int) else int(status is not None)


def leave_process_group() -> None:
    """Destroys all groups. No communicator can be used afterwards."""
    for communicator in list(open_communicators):
        communicator.close()
    if dist.is_initialized():
        dist.destroy_process_group()
