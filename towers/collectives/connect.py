"""The way of communicating that fits the towers."""

from __future__ import annotations

import torch

from towers.collectives import process_group, shared_memory
from towers.collectives.communicator import Communicator
from towers.collectives.process_group import Options
from towers.errors import StartupError
from towers.log import get_logger
from towers.topology import Topology

log = get_logger("towers")


def connect(topology: Topology, device: torch.device, options: Options) -> Communicator:
    """Meet the other towers: :func:`towers.collectives.process_group.connect`, and share memory where that is meant.

    Raises:
        StartupError: ``options`` ask for shared memory, and the towers cannot have it.
        ValueError, HandshakeError, PortInUseError: as of the process group.
    """
    group = process_group.connect(topology, device, options)
    wanted = options.implementation == "shared_memory"
    if group.size == 1 or not (wanted or (options.implementation == "auto" and device.type == "cpu")):
        return group
    found = shared_memory.join(group, options.timeout_seconds)
    if not isinstance(found, str):
        return found
    if wanted:
        raise StartupError(f"implementation is 'shared_memory', but the towers cannot share memory: {found}")
    if topology.is_chief and found != shared_memory.SEVERAL_HOSTS:
        log.info("towers of this host cannot share memory (%s); they use Gloo, which is slower", found)
    return group
