"""Seconds of an all-reduce, a reduce-scatter and an all-gather of n bytes, by algorithm.

Sources, facts only:

- ring and recursive halving: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations
  in MPICH", 2005. A ring's bandwidth cannot be beaten: P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms
  for clusters of workstations", 2009.
- two trees that keep every device's links busy both ways: P. Sanders, J. Speck, J. L. Träff, "Two-tree algorithms for
  full bandwidth broadcast, reduction and scan", 2009.

The arithmetic of the reduction is counted into the bandwidth: fitted from measured all-reduces, it contains it.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from cluster import Cluster, Link

AllReduce = Callable[[Cluster, float], float]
"""(cluster, bytes) → seconds."""


def ring_over(link: Link, size: int, nbytes: float) -> float:
    """An all-reduce over ``size`` equal neighbours: 2(N-1) messages of n/N bytes, one after the other."""
    return 2 * (size - 1) * link.time(nbytes / size)


def ring(cluster: Cluster, nbytes: float) -> float:
    """One flat ring through all devices, host by host; in each host as many parallel rings as it has adapters.

    2(N-1) messages of n/N bytes. All links carry one message after the other, so their bytes go at the pace of the
    slowest; the latencies that add up are those on the longest way of a piece, which leaves out one link of the ring.
    """
    if cluster.size == 1:
        return 0.0
    rounds = cluster.size - 1
    across = min(cluster.hosts, rounds) if cluster.hosts > 1 else 0
    latency = across * cluster.across.latency + (rounds - across) * cluster.inside.latency
    return 2 * (latency + rounds * nbytes / cluster.size / min(link.bandwidth for link in _links(cluster)))


def tree(cluster: Cluster, nbytes: float) -> float:
    """Two binary trees, each for half of the bytes, up and down at once, in the number of pieces that is best.

    In a tree's round each inner device sends one piece up and two down, and receives as many; each device is inner in
    one tree and a leaf in the other, so in k rounds it sends 2n bytes whatever N is. The first piece's way up and down
    is 2 · (log2 L + log2 W) messages long; k-1 others follow it, one in each round. A round counts its latency, as the
    source does, which is careful: a real network has several pieces on their way.
    """
    if cluster.size == 1:
        return 0.0
    depth_inside, depth_across = _depth(cluster.devices), _depth(cluster.hosts)

    def seconds(pieces: int) -> float:
        each = 2 * nbytes / pieces
        first = 2 * depth_inside * cluster.inside.time(each) + 2 * depth_across * cluster.host_across.time(each)
        return first + (pieces - 1) * max(link.time(each) for link in _links(cluster))

    return min(seconds(2**power) for power in range(17))


def hierarchical(cluster: Cluster, nbytes: float) -> float:
    """Reduce-scatter in each host, all-reduce of the parts across hosts, all-gather in each host.

    Every device takes its own part across, so all adapters work; across, the better of ring and trees.
    """
    inside = 2 * (cluster.devices - 1) * cluster.inside.time(nbytes / cluster.devices)
    return inside + across_hosts(cluster, nbytes / cluster.devices)


def leaders(cluster: Cluster, nbytes: float) -> float:
    """What ``towers/collectives/hierarchical.py`` does: one device of each host carries all across, over one adapter.

    An all-reduce in each host, a ring of all n bytes between the leaders, a broadcast in each host.
    """
    if cluster.hosts == 1:
        return ring_over(cluster.inside, cluster.devices, nbytes)
    spread = cluster.inside.time(nbytes) if cluster.devices > 1 else 0.0
    inside = ring_over(cluster.inside, cluster.devices, nbytes)
    return inside + ring_over(cluster.across, cluster.hosts, nbytes) + spread


ALGORITHMS: dict[str, AllReduce] = {"ring": ring, "tree": tree, "hierarchical": hierarchical}
"""What a step is planned with. :func:`leaders` is an option beside them: it never beats ``hierarchical``."""


def across_hosts(cluster: Cluster, nbytes: float) -> float:
    """An all-reduce of ``nbytes`` between each device and its likes on the other hosts, all devices at once."""
    link = device_across(cluster)
    alone = Cluster(cluster.hosts, 1, link, link)
    return min(ring(alone, nbytes), tree(alone, nbytes))


def half(cluster: Cluster, nbytes: float) -> float:
    """A reduce-scatter or an all-gather of ``nbytes``: in each host a ring, across the better of ring and halving.

    Recursive halving takes log2 W messages for the same bytes as a ring. Each is half of the all-reduce of its kind.
    """
    inside = (cluster.devices - 1) * cluster.inside.time(nbytes / cluster.devices)
    part, link = nbytes / cluster.devices, device_across(cluster)
    moved = part * (cluster.hosts - 1) / cluster.hosts / link.bandwidth
    return inside + min(cluster.hosts - 1, _depth(cluster.hosts)) * link.latency + moved


def device_across(cluster: Cluster) -> Link:
    """What one device has of the network while all devices of its host use it."""
    return cluster.across.shared(cluster.adapters / cluster.devices)


def _links(cluster: Cluster) -> list[Link]:
    """Those that a collective of the whole cluster uses."""
    pairs = ((cluster.inside, cluster.devices), (cluster.host_across, cluster.hosts))
    return [link for link, count in pairs if count > 1]


def _depth(size: int) -> int:
    return math.ceil(math.log2(size))
