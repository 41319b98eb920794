"""What this project's own start-up and messages cost, counted in its code.

- ``towers/joining/handshake.py``, ``exchange``: every tower asks the one store for each other's message, with two
  requests each (is it there, what is it), so N towers make 2N² requests, one after the other at the chief.
- ``towers/collectives/communicator.py``, ``all_gather_bytes``: every announcement (``agreement.py``: reduce, gather, an
  epoch, a batch of a stream) gathers a packet of 256 bytes from every tower; between hosts Gloo passes it round a ring.
- ``towers/collectives/shared_memory/barrier.py``: a tower posts and takes one semaphore for every other tower of its
  host.
- ``towers/health/heartbeat.py``: every second each tower stores its heartbeat and looks for queries: two
  requests.
- c10d's Gloo: a process connects to each of the others.
"""

from __future__ import annotations

from cluster import Cluster

PACKET = 256.0
"""Bytes of an announcement that fits into one collective."""

MESSAGE = 500.0
"""Bytes of a tower's message in the handshake, about."""

REQUEST = 50e-6
"""Seconds that the store needs for one request; ``scripts/plan --measure`` prints what it is here."""

HEARTBEATS = 2.0
"""Requests a second that every tower makes to say that it lives."""

READING = 15e-6
"""Seconds of Python that a tower spends on what each other tower announces; --measure prints this one too."""


def handshake_requests(towers: int) -> float:
    """Requests that the store answers until all towers have read all messages, without those made while waiting."""
    return 2.0 * towers * towers


def handshake_seconds(towers: int, request: float = REQUEST) -> float:
    """Seconds that the store needs for them."""
    return handshake_requests(towers) * request


def handshake_bytes(towers: int) -> float:
    """Bytes that leave the chief for them."""
    return MESSAGE * towers * towers


def heartbeats(towers: int, request: float = REQUEST) -> float:
    """Which part of its time the store needs for all towers' heartbeats; above 1 it cannot keep up."""
    return HEARTBEATS * towers * request


def announcement(cluster: Cluster) -> float:
    """Seconds of one announced call through a flat ring: N-1 messages, each as slow as the slowest link."""
    if cluster.size == 1:
        return 0.0
    links = [cluster.inside] * (cluster.devices > 1) + [cluster.across] * (cluster.hosts > 1)
    return (cluster.size - 1) * max(link.time(PACKET) for link in links)


def reading(towers: int) -> float:
    """Seconds that every tower spends on reading an announcement of all."""
    return towers * READING


def announcement_by_hosts(cluster: Cluster) -> float:
    """The same in two levels, across hosts by doubling: log2 W messages, each tower still receives N packets."""
    inside = (cluster.devices - 1) * cluster.inside.time(PACKET)
    rounds = (cluster.hosts - 1).bit_length()
    return inside + rounds * cluster.across.latency + PACKET * cluster.size / cluster.across.bandwidth
