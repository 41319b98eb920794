"""How towers meet and form c10d's default group: all have come, they belong together, and where they talk."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist

from towers.collectives import nccl_watch
from towers.collectives.process_group import (
    ProcessGroupCommunicator,
    backends,
    failures,
    new_group,
    without_greeting,
)
from towers.collectives.shutdown import leave_at_exit
from towers.joining import handshake
from towers.joining.messages import Card
from towers.options import CommunicationOptions
from towers.system import machine, network
from towers.system.torch_private import default_store
from towers.topology import Topology


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
        nccl_watch.watch(failures)
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (topology.index, topology.size):
            raise ValueError(
                f"torch.distributed is initialised as rank {dist.get_rank()} of {dist.get_world_size()}, but "
                f"{topology.origin} says tower {topology.index} of {topology.size}"
            )
        _compare_cards(_store_of_default_group(), topology, device, options)
        return ProcessGroupCommunicator(new_group(backend, timeout), device, backend, timeout, options.wire_dtype)
    store = _join_store(topology, options)
    _choose_network(topology, _compare_cards(store, topology, device, options))
    with without_greeting():
        dist.init_process_group(
            backends(backend),
            store=dist.PrefixStore("c10d", store),
            rank=topology.index,
            world_size=topology.size,
            timeout=timeout,
            device_id=device if backend == "nccl" else None,
        )
    leave_at_exit(may_hang=backend == "nccl")
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
    return dist.PrefixStore(f"towers/later{next(_later)}", default_store())


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
