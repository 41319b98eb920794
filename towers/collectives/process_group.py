"""Towers that communicate through torch.distributed (c10d): NCCL between GPUs, Gloo between CPUs."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from towers import failure, handshake, machine, network
from towers.cards import Card
from towers.collectives import nccl_watch
from towers.collectives.communicator import Communicator, Pending
from towers.failure import is_peer_lost
from towers.log import get_logger
from towers.options import CommunicationOptions
from towers.topology import Topology
from towers.waiting import connection_lost, timeout_error

log = get_logger("towers")

_OPERATIONS = {
    "sum": dist.ReduceOp.SUM,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "prod": dist.ReduceOp.PRODUCT,
}

# The second is its name in older versions of torch, deprecated in 2.13.
_all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ProcessGroupCommunicator(Communicator):
    """Collectives of one c10d process group."""

    def __init__(
        self, group: Any, device: torch.device, backend: str, timeout: timedelta, wire_dtype: str = "same"
    ) -> None:
        self.index = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self.device = device
        self.backend = backend
        # NCCL divides while it sums.
        self._average = dist.ReduceOp.AVG if backend == "nccl" else dist.ReduceOp.SUM
        self.prescale = 1.0 if backend == "nccl" else 1.0 / self.size
        self._group: Any = group
        self._timeout = timeout
        self._wire_dtype = wire_dtype
        _open.add(self)

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> None:
        with self.explained():
            dist.all_reduce(tensor, op=_OPERATIONS[op], group=self._group)

    def start_average(self, tensor: Tensor) -> Pending:
        narrow = self._wire_dtype == "bfloat16" and tensor.dtype == torch.float32
        sent = tensor.bfloat16() if narrow else tensor
        return _Started(self, dist.all_reduce(sent, self._average, self._group, async_op=True), tensor, sent)

    def all_gather(self, tensor: Tensor) -> Tensor:
        with self.explained():
            return self._gather(tensor, async_op=False)[1]

    def start_all_gather(self, tensor: Tensor) -> tuple[Pending, Tensor]:
        work, rows = self._gather(tensor, async_op=True)
        return _Started(self, work, tensor, tensor), rows

    def _gather(self, tensor: Tensor, *, async_op: bool) -> tuple[Any, Tensor]:
        rows = torch.empty((self.size, *tensor.shape), dtype=tensor.dtype, device=tensor.device)
        if self.backend == "nccl" and tensor.is_cuda:
            # From a list c10d makes one tensor for NCCL, and copies row by row out of it; Gloo takes a list.
            whole = tensor.contiguous().view(-1)
            return _all_gather_single(rows.view(-1), whole, group=self._group, async_op=async_op), rows
        return dist.all_gather(list(rows.unbind(0)), tensor, group=self._group, async_op=async_op), rows

    def all_to_all(self, rows: Tensor) -> Tensor:
        given = torch.empty_like(rows, memory_format=torch.contiguous_format)
        with self.explained():
            dist.all_to_all_single(given, rows.contiguous(), group=self._group)
        return given

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        with self.explained():
            dist.broadcast(tensor, group=self._group, group_src=source)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Say what a backend's time-out or lost connection means."""
        try:
            yield
        except RuntimeError as error:
            me = self.towers[self.index]
            if "timed out" in str(error).lower():
                raise timeout_error(self.health, me, self._timeout.total_seconds()) from None
            if is_peer_lost(error):
                raise connection_lost(self.health, me, error) from error
            raise

    def channel(self) -> ProcessGroupCommunicator:
        return self._with(_new_group(self.backend, self._timeout))

    def among(self, towers: Sequence[int]) -> ProcessGroupCommunicator | None:
        """A communicator of some of the towers, in ascending order; all towers call this. None for those not in it."""
        group = _new_group(self.backend, self._timeout, list(towers))
        if self.index not in towers:
            return None
        some = self._with(group)
        some.towers = [self.towers[tower] for tower in towers]
        return some

    def _with(self, group: Any) -> ProcessGroupCommunicator:
        other = ProcessGroupCommunicator(group, self.device, self.backend, self._timeout, self._wire_dtype)
        other.health = self.health
        return other

    def close(self) -> None:
        self._group = None

    def failure(self) -> Exception | None:
        """What NCCL has found out while no host was waiting for it."""
        group = self._group
        if self.backend != "nccl" or group is None:
            return None
        found = group._get_backend(self.device).get_error().name
        if found == "SUCCESS":
            return None
        me = self.towers[self.index]
        if found == "TIMEOUT":
            return timeout_error(self.health, me, self._timeout.total_seconds())
        return connection_lost(self.health, me, RuntimeError(f"NCCL: {found}"))


class _Started:
    """The average of ``tensor``, which travels as ``sent``."""

    def __init__(self, communicator: ProcessGroupCommunicator, work: Any, tensor: Tensor, sent: Tensor) -> None:
        self._communicator = communicator
        self._work = work
        self._tensor, self._sent = tensor, sent

    def wait(self) -> None:
        with self._communicator.explained():
            self._work.wait()
        if self._sent is not self._tensor:
            self._tensor.copy_(self._sent)


_open: weakref.WeakSet[ProcessGroupCommunicator] = weakref.WeakSet()
"""Communicators that hold a group, which is only really destroyed when nobody holds it."""


def _failures() -> Iterator[Exception | None]:
    try:
        communicators = list(_open)
    except RuntimeError:  # one was added meanwhile
        return
    for communicator in communicators:
        yield communicator.failure()


def connect(topology: Topology, device: torch.device, options: CommunicationOptions) -> ProcessGroupCommunicator:
    """Meet the other towers and form c10d's default process group with them.

    A default group that exists already (the script made it, or an earlier strategy did) stays; the towers get
    a group of their own beside it, and meet in its store.

    Args:
        topology: this tower's place; its ``address`` says where to meet.
        device: this tower's device.

    Raises:
        StartupError: not all towers came before the deadline; lists the missing.
        HandshakeError: the towers do not belong together: versions, options or devices contradict; or this process
            has another job token than the others.
        PortInUseError: the address to meet at is taken.
        ValueError: an existing default group has another size, or the options do not fit the device.
    """
    backend = options.backend(device)
    timeout = timedelta(seconds=options.timeout_seconds)
    if topology.local_size == topology.size:
        network.keep_to_loopback()
    if backend == "nccl":
        _choose_algorithm(options.algorithm)
        torch.cuda.set_device(device)
        nccl_watch.watch(_failures)
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (topology.index, topology.size):
            raise ValueError(
                f"torch.distributed is initialised as rank {dist.get_rank()} of {dist.get_world_size()}, but "
                f"{topology.origin} says tower {topology.index} of {topology.size}"
            )
        _compare_cards(_store_of_default_group(), topology, device, options)
        return ProcessGroupCommunicator(_new_group(backend, timeout), device, backend, timeout, options.wire_dtype)
    store = _join_store(topology, options)
    _choose_network(topology, _compare_cards(store, topology, device, options))
    with _without_greeting():
        dist.init_process_group(
            _backends(backend),
            store=dist.PrefixStore("c10d", store),
            rank=topology.index,
            world_size=topology.size,
            timeout=timeout,
            device_id=device if backend == "nccl" else None,
        )
    _leave_at_exit()
    return ProcessGroupCommunicator(dist.group.WORLD, device, backend, timeout, options.wire_dtype)


def refuse_unknown_peers() -> None:
    """See that a process that no launcher started has not been given peers by hand.

    Raises:
        ValueError: torch.distributed has several ranks, but nothing says which towers are on which machine.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"torch.distributed is initialised with {dist.get_world_size()} ranks, but RANK, WORLD_SIZE, MASTER_ADDR, "
            "MASTER_PORT, LOCAL_RANK and LOCAL_WORLD_SIZE are not set: set them, or leave the initialisation to the "
            "strategy"
        )


def _backends(backend: str) -> str:
    """What c10d is told: beside NCCL there is Gloo, for the towers' messages on the host."""
    return "cpu:gloo,cuda:nccl" if backend == "nccl" else backend


def _new_group(backend: str, timeout: timedelta, ranks: list[int] | None = None) -> Any:
    with _without_greeting():
        return dist.new_group(ranks, timeout=timeout, backend=_backends(backend))


_later = itertools.count()
_pinned_ring = False


def _choose_algorithm(algorithm: str) -> None:
    """Pin NCCL's ring for the groups that come, or leave the choice to NCCL; who has set NCCL_ALGO has chosen."""
    global _pinned_ring
    if algorithm == "ring" and "NCCL_ALGO" not in os.environ:
        os.environ["NCCL_ALGO"] = "Ring"
        _pinned_ring = True
    elif algorithm != "ring" and _pinned_ring:
        os.environ.pop("NCCL_ALGO", None)
        _pinned_ring = False


def _store_of_default_group() -> dist.Store:
    """Where the towers of one more strategy meet."""
    return dist.PrefixStore(f"towers/later{next(_later)}", dist.distributed_c10d._get_default_store())


def _join_store(topology: Topology, options: CommunicationOptions) -> dist.Store:
    """Where the towers of a job meet first."""
    assert topology.address is not None
    host, port = topology.address
    timeout = timedelta(seconds=options.startup_timeout_seconds)
    if topology.serves_store and topology.is_chief:
        store = handshake.serve_store(host, port, timeout, topology.origin, topology.token)
    else:
        deadline = time.monotonic() + options.startup_timeout_seconds
        who = "tower 0" if topology.serves_store else "the launcher's store"
        own = f"tower {topology.index}"
        store = handshake.join_store(host, port, timeout, deadline, who, topology.origin, topology.token, own)
    return dist.PrefixStore(f"towers/attempt{topology.attempt}", store)


def _compare_cards(
    store: dist.Store, topology: Topology, device: torch.device, options: CommunicationOptions
) -> list[Card]:
    """Wait until all towers have come to ``store``, and see that they belong together; returns what they say."""
    return handshake.meet(
        store,
        {
            "options": asdict(options),
            "machine": machine.host_identity(),
            "network": machine.network_identity(),
            "address": machine.address_towards(*topology.address) if topology.address is not None else None,
            "device": str(device),
            "gpu": str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None,
        },
        kind="tower",
        index=topology.index,
        names=[f"rank {i}" for i in range(topology.size)],
        deadline=time.monotonic() + options.startup_timeout_seconds,
        origin=topology.origin,
        token=topology.token,
        compare=compare_towers,
        serves=topology.serves_store and topology.is_chief,
    )


def compare_towers(index: int, card: Card, other: int, reference: Card) -> str | None:
    """Why two towers cannot work together, or None."""
    where = f"tower {index} (on {card['host']})", f"tower {other} (on {reference['host']})"
    if card["options"] != reference["options"]:
        return f"different communication options: {card['options']} on {where[0]}, {reference['options']} on {where[1]}"
    if card["gpu"] and (card["gpu"], card["machine"]) == (reference["gpu"], reference["machine"]):
        return (
            f"{where[0]} and {where[1]} use the same GPU, {card['device']}; give each a GPU of its own "
            "(LOCAL_RANK tells a tower which, CUDA_VISIBLE_DEVICES which there are)"
        )
    return None


def _choose_network(topology: Topology, cards: list[Card]) -> None:
    """Keep to the network interface that leads to the other towers."""
    assert topology.address is not None
    place = [(card["machine"], card["network"]) for card in cards]
    own = place[topology.index]
    elsewhere = [card["address"] for card, there in zip(cards, place, strict=True) if there != own]
    if not elsewhere:
        interface: str | None = machine.loopback_interface()
    else:
        # The chief's own name may lead it to a loopback address; where the others are, they know themselves.
        target = topology.address[0] if own != place[0] else next(filter(None, elsewhere), topology.address[0])
        address = machine.address_towards(target, topology.address[1])
        interface = machine.interface_of(address) if address else None
    if interface:
        network.keep_to(interface)


@contextlib.contextmanager
def _without_greeting() -> Iterator[None]:
    """Keep standard output clean while groups are made: Gloo of torch 2.9 writes who it connected to there.

    Not where NCCL is to write there, for who looks for what is wrong.
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


_LEAVING_SECONDS = 60.0


def _leave_at_exit() -> None:
    """Leave the group before the interpreter is taken down.

    Gloo's threads may still let go of the last collective's tensors, for which they need the interpreter; a
    process that ends while they do is aborted (seen with torch 2.13). Destroying the groups joins them.

    NCCL waits for all towers then, also for one that is gone or has more to do, and for CUDA graphs that hold
    collectives. Its destructors would, too, so a process that cannot leave in time ends without them.
    """
    ending = threading.Event()

    def leave_when_ending() -> None:
        ending.wait()
        leave_process_group()

    # Started now: some versions of Python (3.12.0 to 3.12.2) start no threads at exit.
    leaving = threading.Thread(target=leave_when_ending, name="towers-leave", daemon=True)
    leaving.start()

    def leave() -> None:
        error = getattr(sys, "last_value", None)  # its report has been written by now
        told = max((communicator.health.exit_code for communicator in list(_open)), default=0)
        ending.set()
        leaving.join(_LEAVING_SECONDS if error is None else 1.0)
        if not leaving.is_alive():
            return
        if error is None:
            log.warning(
                "the process groups could not be destroyed within %.0f s: another tower has not ended yet, or there is "
                "a CUDA graph that holds collectives (delete it before the program ends); ending without it",
                _LEAVING_SECONDS,
            )
            failure.leave(told)  # a SystemExit's own code cannot be seen here
        failure.leave(128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1)

    atexit.register(leave)


def leave_process_group() -> None:
    """Destroy all groups; no communicator can be used afterwards."""
    for communicator in list(_open):
        communicator.close()
    if dist.is_initialized():
        dist.destroy_process_group()
