"""The way of communicating that fits the towers."""

from __future__ import annotations

import contextlib
import os

import torch

from towers.collectives.communicator import Alone, Communicator
from towers.collectives.connecting import default_group
from towers.collectives.hierarchical import HierarchicalCommunicator
from towers.collectives.process_group import ProcessGroupCommunicator
from towers.collectives.shared_memory import communicator as shared_memory
from towers.errors import StartupError
from towers.health.heartbeat import Heartbeat
from towers.health.status import Health
from towers.health.status_record import Record
from towers.health.step_deadline import StepDeadline
from towers.options import CommunicationOptions
from towers.system import machine
from towers.system.log import get_logger
from towers.topology import WHEREABOUTS, Topology

log = get_logger("towers")


def connect(topology: Topology, device: torch.device, options: CommunicationOptions) -> Communicator:
    """Meet the other towers: :func:`towers.collectives.connecting.default_group.connect`, and share memory where that
    can be.

    Raises:
        StartupError: ``options`` ask for shared memory, and the towers cannot have it.
        ValueError, HandshakeError, PortInUseError: as of the process group.
    """
    record = _record()
    health = Health(record)
    health.enter("meeting the other towers")
    group = default_group.connect(topology, device, options)
    group.health = health
    health.watch(group)
    if group.size > 1:
        health.heartbeat = Heartbeat(health, record, topology)
        StepDeadline(health, record, topology.index, options.step_timeout_seconds)
    chosen = _fitting(group, device, options)
    health.enter("")
    return chosen


def _record() -> Record:
    """Where whoever started this tower finds out where it is, if it asked for that."""
    path = os.environ.get(WHEREABOUTS)
    with contextlib.suppress(OSError):  # a directory that is gone must not keep a tower from working
        return Record(path, create=path is not None)
    return Record()


def _fitting(group: ProcessGroupCommunicator, device: torch.device, options: CommunicationOptions) -> Communicator:
    wanted = options.implementation == "shared_memory"
    if group.size == 1 or not (wanted or (options.implementation == "auto" and device.type == "cpu")):
        return group
    found = shared_memory.join(group, options.timeout_seconds)
    if not isinstance(found, str):
        return found
    if wanted:
        raise StartupError(f"implementation is 'shared_memory', but the towers cannot share memory: {found}")
    if found == shared_memory.SEVERAL_HOSTS:
        return _by_hosts(group, options)
    _say_why_not(group.index, found)
    return group


def _by_hosts(group: ProcessGroupCommunicator, options: CommunicationOptions) -> Communicator:
    """Shared memory inside each host, the group across hosts; the group alone where that is of no use."""
    by_host: dict[bytes, list[int]] = {}
    for tower, host in enumerate(group.all_gather_bytes(machine.host_identity().encode())):
        by_host.setdefault(host, []).append(tower)
    hosts = list(by_host.values())
    if len(hosts) == group.size:
        return group
    local: Communicator = Alone(group.device)
    reason = ""
    for towers in hosts:
        inside = group.among(towers)
        if inside is not None and inside.size > 1:
            found = shared_memory.join(inside, options.timeout_seconds)
            local, reason = (inside, found) if isinstance(found, str) else (found, "")
    reasons = [text.decode() for text in group.all_gather_bytes(reason.encode())]
    if any(reasons):
        _say_why_not(group.index, next(filter(None, reasons)))
        return group
    return HierarchicalCommunicator(group, hosts, local)


def _say_why_not(index: int, reason: str) -> None:
    if index == 0:
        log.info("towers of this host cannot share memory (%s); they use Gloo, which is slower", reason)
