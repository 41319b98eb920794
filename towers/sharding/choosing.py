"""Which way a strategy's optimizers are sharded.

[Note: ways to shard] Towers that share memory average their own chunks of the gradients only
(:mod:`towers.gradients.reduce_scatter`), write their shards into each other's parameters, and can read each other's
state alone. All others (GPUs, several hosts) average whole gradients, and gather shards and state by collectives. With
central storage the parameters that are updated, and the state, lie in the memory of one host. :func:`transport_for`
decides it, and nothing else in the sharded step asks for it.
"""

from __future__ import annotations

from towers.collectives.communicator import Communicator
from towers.collectives.shared_memory.communicator import SharedMemoryCommunicator
from towers.sharding.transport import ShardTransport, SharedParameters


def transport_for(channel: Communicator, *, central: bool, timeout: float) -> ShardTransport:
    """The transport between the towers of ``channel``, over which their gradients are averaged; all of them call it.

    Args:
        central: whether parameters and state are to lie once in the memory of a host.
        timeout: seconds that a collective may take.

    Raises:
        StartupError: on all towers: central storage, and they cannot share memory.
    """
    if central:
        from towers.sharding.central import CentralStorage, on_one_host

        return CentralStorage(channel, on_one_host(channel, timeout))
    if isinstance(channel, SharedMemoryCommunicator):
        return SharedParameters(channel)
    return ShardTransport(channel)
