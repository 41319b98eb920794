"""Connects the towers, and chooses how they communicate.

After a handshake of all towers (:mod:`towers.joining.participant`), they form c10d's default group, and share memory if
they can. Towers that share a device have received the implementation "host" before.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict
from datetime import timedelta

import torch
import torch.distributed as dist

from towers.collectives import nccl
from towers.collectives.communicator import Alone, Communicator
from towers.collectives.process_group import ProcessGroupCommunicator, failures, join_default_group, new_group
from towers.collectives.shared_memory import communicator as shared_memory
from towers.errors import StartupError
from towers.health import heartbeat
from towers.health.status import Health
from towers.joining.participant import Participant
from towers.joining.store import Message
from towers.options import CommunicationOptions
from towers.system import accelerator, machine
from towers.system.messages import digest_of, get_logger
from towers.system.torch_private import bound_device, default_store
from towers.topology import Topology

log = get_logger("towers")

_later = itertools.count()


def connect(topology: Topology, device: torch.device, options: CommunicationOptions) -> Communicator:
    """Joins the other towers, forms c10d's default process group with them, and shares memory if that is possible.

    An existing default group (of the script, or of an earlier strategy) stays. The towers then get their own group in
    addition, and join in the launcher's store, or in that group's store if no launcher serves one.

    Args:
        topology: this tower's place; its ``address`` is that of the store where the towers join.
        device: this tower's device.

    Raises:
        StartupError: not all towers joined before the deadline, and the message lists the missing ones; or ``options``
            require shared memory, and the towers cannot share any.
        HandshakeError: the towers do not belong together: versions, options or devices contradict each other, or this
            process has another job token than the others.
        PortInUseError: the store's address is taken.
        ValueError: an existing default group has another size, or the options do not fit the device.
    """
    assert topology.address is not None
    health = Health.of_this_tower("joining the other towers")
    backend, where = _backend_or_host(options.implementation, device), device
    if staged := backend == "host":
        backend, where = "gloo", torch.device("cpu")
    timeout = timedelta(seconds=options.timeout_seconds)
    if backend == "nccl":
        nccl.choose_algorithm(options.algorithm, on_one_host=topology.local_size == topology.size)
        nccl.watch(failures)
    tower = Participant(
        kind="tower",
        index=topology.index,
        names=[f"rank {i}" for i in range(topology.size)],
        address=topology.address,
        chief_serves=topology.chief_serves,
        origin=topology.origin,
        token=topology.token,
        seconds=options.startup_timeout_seconds,
    )
    if beside := dist.is_initialized():
        _check_default_group(tower, device, backend)
        opened = default_store() if tower.chief_serves else tower.open_store()
        store = dist.PrefixStore(f"towers/attempt{topology.attempt}/later{next(_later)}", opened)
    else:
        opened = tower.open_store()
        opened.set_timeout(timedelta(seconds=tower.seconds))
        store = dist.PrefixStore(f"towers/attempt{topology.attempt}", opened)
    message, terms = description(machine.identity(*topology.address), device, options)
    shares_devices = options.implementation == "host"
    answer = tower.handshake(
        store,
        message,
        terms,
        compare_towers,
        unique=lambda other: None if shares_devices else _accelerator(other),
        facts=network_of_all,
    )
    _choose_network(tower, message, answer)
    if beside:
        group = ProcessGroupCommunicator(new_group(backend, timeout), where, backend, timeout, options.wire_dtype)
    else:
        c10d = dist.PrefixStore("c10d", store)
        group = join_default_group(c10d, tower.index, topology.size, where, backend, timeout, options.wire_dtype)
    group.health = health
    health.watch(group)
    if group.size > 1:
        heartbeat.start(health, tower, store, options.step_timeout_seconds)
    chosen = _share_memory(group, options)
    if staged:
        from towers.collectives.host_staged import HostStagedCommunicator

        chosen = HostStagedCommunicator(chosen, device)
        if tower.index == 0:
            none = f"torch has no collectives between {device.type}s"
            reason = "so it was asked, or towers share a device" if options.implementation == "host" else none
            log.info("gradients go through the hosts' memory: %s", reason)
    health.enter("")
    log.debug("tower %d is connected by %s", tower.index, chosen.backend)
    return chosen


def _backend_or_host(implementation: str, device: torch.device) -> str:
    """Returns the c10d backend for tensors on ``device``, or "host". Towers that share memory use Gloo in addition.

    Raises:
        ValueError: the implementation does not work on this device.
    """
    if implementation in ("auto", "host") and device.type == "cpu":
        return "gloo"
    if implementation == "auto":
        own = dist.Backend.default_device_backend_map.get(device.type, "gloo")
        return own if own != "gloo" and dist.is_backend_available(own) else "host"
    if implementation == "nccl" and device.type != "cuda":
        raise ValueError(f"implementation 'nccl' works between GPUs; this tower runs on {device}")
    if implementation == "shared_memory" and device.type != "cpu":
        raise ValueError(f"implementation 'shared_memory' works between CPU towers; this tower runs on {device}")
    return "gloo" if implementation == "shared_memory" else implementation


def refuse_unknown_peers() -> None:
    """Checks that the script has not formed a process group of several ranks without a launcher's variables.

    Raises:
        ValueError: torch.distributed has several ranks, but no variable describes which towers are on which machine.
    """
    if dist.is_initialized() and dist.get_world_size() > 1:
        raise ValueError(
            f"torch.distributed is initialised with {dist.get_world_size()} ranks, but RANK, WORLD_SIZE, MASTER_ADDR, "
            "MASTER_PORT, LOCAL_RANK and LOCAL_WORLD_SIZE are not set: set them, or leave the initialisation to the "
            "strategy"
        )


def _check_default_group(tower: Participant, device: torch.device, backend: str) -> None:
    """Checks that the existing default group fits the launcher's description.

    Raises:
        ValueError: it does not.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) != (tower.index, len(tower.names)):
        raise ValueError(
            f"torch.distributed is initialised as rank {rank} of {size}, but {tower.origin} names tower "
            f"{tower.index} of {len(tower.names)}"
        )
    if backend == "nccl":
        nccl.check_bound(bound_device(), device)


def description(place: Message, device: torch.device, options: CommunicationOptions) -> tuple[Message, Message]:
    """Returns what a tower publishes: its message, and the terms that all towers must have.

    Args:
        place: the result of :func:`towers.system.machine.identity`.
    """
    uuid = accelerator.uuid(device) if device.type != "cpu" else None
    message = {**place, "machine": digest_of(place["machine"])[:16], "device": str(device), "accelerator": uuid}
    return message, {"options": asdict(options), "kind": device.type}


def compare_towers(index: int, message: Message, other: int, reference: Message) -> str | None:
    """Returns why two towers cannot work together, or None."""
    where = f"tower {index} (on {message['host']})", f"tower {other} (on {reference['host']})"
    if message["options"] != reference["options"]:
        return (
            f"different communication options: {message['options']} on {where[0]}, {reference['options']} on {where[1]}"
        )
    kinds = {torch.device(each["device"]).type for each in (message, reference)}
    if len(kinds) > 1:
        return (
            f"{where[0]} runs on {message['device']}, {where[1]} on {reference['device']}, but all towers need devices "
            "of one kind. Run `mirrored doctor` on both hosts, or choose the kind: devices=['cpu']"
        )
    is_same = all(message[key] == reference[key] for key in ("accelerator", "machine"))
    if message["accelerator"] and is_same and message["options"]["implementation"] != "host":
        return (
            f"{where[0]} and {where[1]} use the same GPU, {message['device']}; give each its own GPU (LOCAL_RANK "
            "is a tower's index on its host, CUDA_VISIBLE_DEVICES lists the GPUs), or let them share it: "
            f"devices={[message['device'], message['device']]!r}"
        )
    return None


def _accelerator(message: Message) -> tuple[str, str] | None:
    """Returns a tower's accelerator and the machine that has it, or None for a tower on the CPU."""
    return (message["accelerator"], message["machine"]) if message["accelerator"] else None


def network_of_all(messages: Sequence[Message]) -> Message:
    """Returns the place of tower 0 and the address of a tower elsewhere, or nothing if all are in one place."""
    elsewhere = [message["address"] for message in messages if _place(message) != _place(messages[0])]
    address = next(filter(None, elsewhere), None)
    return {"place": _place(messages[0]), "elsewhere": address} if elsewhere else {}


def _place(message: Message) -> str:
    """Returns a short text that is equal for towers with the same network interfaces."""
    return digest_of([message["machine"], message["network"]])


def _choose_network(tower: Participant, own: Message, answer: Message) -> None:
    """Listens on the network interface that leads to the other towers; see [Note: the interface is looked up].

    Args:
        own: this tower's message.
        answer: the result of :func:`network_of_all`.
    """
    if not answer:
        machine.listen_on()
        return
    # The chief's own name may resolve to a loopback address here; the others send their own addresses.
    host, port = tower.address
    target = answer["elsewhere"] or host if _place(own) == answer["place"] else host
    address = machine.address_towards(target, port)
    if address and (interface := machine.interface_of(address)):
        machine.listen_on(interface)


def _share_memory(group: ProcessGroupCommunicator, options: CommunicationOptions) -> Communicator:
    """Returns a communicator through shared memory (everywhere or in each host) if possible, otherwise ``group``."""
    wanted = options.implementation == "shared_memory"
    if group.size == 1 or not (wanted or (options.implementation in ("auto", "host") and group.device.type == "cpu")):
        return group
    shared = shared_memory.join(group, options.timeout_seconds)
    if not isinstance(shared, str):
        return shared
    if wanted:
        raise StartupError(f"implementation is 'shared_memory', but the towers cannot share memory: {shared}")
    if shared == shared_memory.SEVERAL_HOSTS:
        return _by_hosts(group, options)
    _log_reason(group.index, shared)
    return group


def _by_hosts(group: ProcessGroupCommunicator, options: CommunicationOptions) -> Communicator:
    """Returns a communicator with shared memory in each host and ``group`` across hosts, or ``group`` alone."""
    by_host: dict[bytes, list[int]] = {}
    for tower, host in enumerate(group.all_gather_bytes(machine.host_identity().encode())):
        by_host.setdefault(host, []).append(tower)
    hosts = list(by_host.values())
    if len(hosts) == group.size:
        return group
    from towers.collectives.hierarchical import HierarchicalCommunicator

    local: Communicator = Alone(group.device)
    reason = ""
    if (inside := group.among([towers for towers in hosts if len(towers) > 1])) is not None:
        shared = shared_memory.join(inside, options.timeout_seconds)
        local, reason = (inside, shared) if isinstance(shared, str) else (shared, "")
    reasons = [text.decode() for text in group.all_gather_bytes(reason.encode())]
    if any(reasons):
        _log_reason(group.index, next(filter(None, reasons)))
        return group
    return HierarchicalCommunicator(group, hosts, local)


def _log_reason(index: int, reason: str) -> None:
    if index == 0:
        log.info("towers of this host cannot share memory (%s); they use Gloo, which is slower", reason)
