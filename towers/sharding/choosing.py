"""Chooses how a strategy's optimizers are sharded.

[Note: ways to shard] Towers that share memory average only their own chunks of the gradients
(:mod:`towers.gradients.reductions`), write their shards into each other's parameters, and can read each other's
state without their help. GPUs also average only their chunks, and gather shards and state with collectives. All other
towers (CPUs of several hosts, other accelerators) average whole gradients. With central storage, the updated parameters
and the state are in the memory of one host. :func:`transport_for` decides between them, and no other code of the
sharded step depends on the choice.
"""

from __future__ import annotations

from towers.collectives.agreement import RepeatedCalls
from towers.collectives.communicator import Communicator
from towers.collectives.process_group import ProcessGroupCommunicator
from towers.collectives.shared_memory.communicator import SharedMemoryCommunicator
from towers.sharding.transport import GatheredParameters, ShardTransport, SharedParameters


def transport_for(channel: Communicator, calls: RepeatedCalls, *, central: bool, timeout: float) -> ShardTransport:
    """Returns the transport between the towers of ``channel``, which averages their gradients. All towers call it.

    Args:
        calls: compares calls of the script with the other towers.
        central: whether one copy of parameters and state is in the memory of a host.
        timeout: seconds for a collective.

    Raises:
        StartupError: on all towers: central storage was selected, and they cannot share memory.
    """
    if central:
        from towers.sharding.central import CentralStorage, on_one_host

        return CentralStorage(channel, on_one_host(channel, timeout))
    if isinstance(channel, SharedMemoryCommunicator):
        return SharedParameters(channel)
    if isinstance(channel, ProcessGroupCommunicator) and channel.may_scatter:
        return GatheredParameters(channel, calls)
    return ShardTransport(channel)
