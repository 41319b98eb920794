"""A model of a training step on many hosts: latency, bandwidth and overlap. Seconds and bytes everywhere.

docs/project/scaling.md has its formulas and the source of each figure. scripts/plan prints its tables.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import NormalDist


@dataclass(frozen=True)
class Link:
    """A way from a device (or a network adapter) to the next; it sends and receives at the same time.

    Attributes:
        latency: seconds that the smallest message takes, software included.
        bandwidth: bytes per second in one direction that a program really gets.
    """

    latency: float
    bandwidth: float

    def time(self, nbytes: float) -> float:
        """Seconds of a message of ``nbytes``."""
        return self.latency + nbytes / self.bandwidth


@dataclass(frozen=True)
class Cluster:
    """W hosts with L devices each.

    Attributes:
        hosts, devices: W, and L in each host.
        inside: the link of one device to the others of its host.
        across: the link of one network adapter to other hosts.
        adapters: network adapters of a host, shared by its devices.
        memory: bytes of one device.
        about: where the figures come from.
    """

    hosts: int
    devices: int
    inside: Link
    across: Link
    adapters: int = 1
    memory: float = math.inf
    about: str = ""

    @property
    def size(self) -> int:
        """The number of devices: N."""
        return self.hosts * self.devices

    def network(self, devices: int) -> Link:
        """The part of a host's adapters that each device has while ``devices`` of its host use them."""
        return replace(self.across, bandwidth=self.across.bandwidth * self.adapters / devices)

    def links(self, across: Link) -> list[Link]:
        """The links that a collective of the whole cluster uses."""
        pairs = ((self.inside, self.devices), (across, self.hosts))
        return [link for link, count in pairs if count > 1]


def ring_over(link: Link, size: int, nbytes: float) -> float:
    """An all-reduce over ``size`` equal neighbours: 2(N-1) messages of n/N bytes, one after the other."""
    return 2 * (size - 1) * link.time(nbytes / size)


def ring(cluster: Cluster, nbytes: float) -> float:
    """One flat ring through all devices, host by host; in each host as many parallel rings as it has adapters.

    Bytes go at the pace of the slowest link; the latencies that add up are those on the longest way of a piece, which
    leaves out one link of the ring.
    """
    if cluster.size == 1:
        return 0.0
    rounds = cluster.size - 1
    across = min(cluster.hosts, rounds) if cluster.hosts > 1 else 0
    latency = across * cluster.across.latency + (rounds - across) * cluster.inside.latency
    slowest = min(link.bandwidth for link in cluster.links(cluster.network(1)))
    return 2 * (latency + rounds * nbytes / cluster.size / slowest)


def tree(cluster: Cluster, nbytes: float) -> float:
    """Two binary trees, each for half of the bytes, up and down at once, in the number of pieces that is best.

    The first piece's way up and down is 2 · (log2 L + log2 W) messages long; k-1 others follow it, one in each round.
    """
    if cluster.size == 1:
        return 0.0

    def seconds(pieces: int) -> float:
        each = 2 * nbytes / pieces
        across = cluster.network(1)
        first = 2 * _depth(cluster.devices) * cluster.inside.time(each) + 2 * _depth(cluster.hosts) * across.time(each)
        return first + (pieces - 1) * max(link.time(each) for link in cluster.links(across))

    return min(seconds(2**power) for power in range(17))


def hierarchical(cluster: Cluster, nbytes: float) -> float:
    """Reduce-scatter in each host, all-reduce of the parts across hosts (the better of ring and trees), all-gather.

    Every device takes its own part across, so all adapters work.
    """
    inside = 2 * (cluster.devices - 1) * cluster.inside.time(nbytes / cluster.devices)
    link, part = cluster.network(cluster.devices), nbytes / cluster.devices
    alone = Cluster(cluster.hosts, 1, link, link)
    return inside + min(ring(alone, part), tree(alone, part))


def leaders(cluster: Cluster, nbytes: float) -> float:
    """The algorithm of towers/collectives/hierarchical.py but for averages: one device of each host carries all across.

    An all-reduce in each host, a ring of all n bytes between the leaders over one adapter, a broadcast in each host.
    """
    inside = ring_over(cluster.inside, cluster.devices, nbytes)
    if cluster.hosts == 1:
        return inside
    spread = cluster.inside.time(nbytes) if cluster.devices > 1 else 0.0
    return inside + ring_over(cluster.across, cluster.hosts, nbytes) + spread


def half(cluster: Cluster, nbytes: float) -> float:
    """A reduce-scatter or an all-gather: in each host a ring, across the better of ring and recursive halving."""
    part, link = nbytes / cluster.devices, cluster.network(cluster.devices)
    moved = part * (cluster.hosts - 1) / cluster.hosts / link.bandwidth
    inside = (cluster.devices - 1) * cluster.inside.time(part)
    return inside + min(cluster.hosts - 1, _depth(cluster.hosts)) * link.latency + moved


def _depth(size: int) -> int:
    return math.ceil(math.log2(size))


ALGORITHMS: dict[str, Callable[[Cluster, float], float]] = {"ring": ring, "tree": tree, "hierarchical": hierarchical}
"""(cluster, bytes) → seconds. :func:`leaders` never beats ``hierarchical``."""


FIRST_BUCKET = float(2**20)
"""Bytes of the first bucket, as in towers/gradients/buckets.py."""


@dataclass(frozen=True)
class Model:
    """The work of one device in a step, and what it exchanges.

    Attributes:
        gradients: bytes of all gradients, and of all parameters.
        forward, backward, optimizer: seconds of a step's phases on one device, alone.
        batch: examples (or tokens) of one device's share, for which these times hold.
        bucket: bytes of a bucket.
        spread: pieces of backward in its order, as (share of its time, share of the gradients' bytes).
        state: bytes of the optimizer's state, with a master copy where there is one.
        noise: standard deviation of forward + backward between devices, as a share of it.
        unit: what ``batch`` counts.
        about: where the figures come from.
    """

    gradients: float
    forward: float
    backward: float
    optimizer: float = 0.0
    batch: float = 1.0
    bucket: float = 25.0 * 2**20
    spread: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    state: float = 0.0
    noise: float = 0.0
    unit: str = "examples"
    about: str = ""

    @property
    def compute(self) -> float:
        """Seconds of a step without any other device."""
        return self.forward + self.backward + self.optimizer

    def with_batch(self, batch: float) -> Model:
        """The same model with another share: forward and backward in proportion, the optimizer as before."""
        factor = batch / self.batch
        return replace(self, batch=batch, forward=self.forward * factor, backward=self.backward * factor)

    def ready(self, nbytes: float) -> float:
        """Seconds after the start of backward at which the first ``nbytes`` of gradients are there."""
        time = arrived = 0.0
        for share_of_time, share_of_bytes in self.spread:
            here = share_of_bytes * self.gradients
            if here > 0 and arrived + here >= nbytes * (1 - 1e-12):
                return (time + share_of_time * (nbytes - arrived) / here) * self.backward
            time, arrived = time + share_of_time, arrived + here
        return self.backward

    def buckets(self) -> list[tuple[float, float]]:
        """The seconds after the start of backward at which each bucket is full, and its bytes."""
        sizes: list[float] = []
        while (left := self.gradients - sum(sizes)) > 0:
            sizes.append(min(left, self.bucket) if sizes else min(left, self.bucket, FIRST_BUCKET))
        return [(self.ready(end), size) for end, size in zip(itertools.accumulate(sizes), sizes, strict=True)]


@dataclass(frozen=True)
class Step:
    """The seconds of a step.

    Attributes:
        compute: without any other device.
        exposed: communication that is not hidden behind backward.
        straggling: expected wait for the slowest device.
    """

    compute: float
    exposed: float
    straggling: float

    @property
    def total(self) -> float:
        """The whole step."""
        return self.compute + self.exposed + self.straggling

    @property
    def efficiency(self) -> float:
        """Share of the step that one device alone would also have taken."""
        return self.compute / self.total


def step(model: Model, cluster: Cluster, algorithm: str) -> Step:
    """A step with one of :data:`ALGORITHMS`; with "sharded", each device updates 1/N of the parameters only.

    A sharded step has a reduce-scatter in the all-reduce's place, 1/N of the optimizer's time, and an all-gather of the
    parameters that nothing hides.
    """
    sharded = algorithm == "sharded"
    collective = half if sharded else ALGORITHMS[algorithm]
    optimizer = model.optimizer / cluster.size if sharded else model.optimizer
    exposed = straggling = free = 0.0
    if cluster.size > 1:
        for ready, nbytes in model.buckets():  # one collective after the other
            free = max(free, ready) + collective(cluster, nbytes)
        exposed = max(0.0, free - model.backward) + (half(cluster, model.gradients) if sharded else 0.0)
        straggling = model.noise * (model.forward + model.backward) * slowest_of(cluster.size)
    return Step(model.forward + model.backward + optimizer, exposed, straggling)


def slowest_of(count: int) -> float:
    """Expected maximum of ``count`` normal variables, in standard deviations: Blom's approximation (1958)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


DEVICE_MTBF = 50_700 * 3600.0
"""Mean seconds until one device, or what belongs to it, stops the job."""


def save_interval(save: float, mtbf: float) -> float:
    """Seconds between two checkpoints, of ``save`` each, that lose the least time (Young, 1974)."""
    return math.sqrt(2 * save * mtbf)


def useful(save: float, mtbf: float, restart: float) -> float:
    """Share of the time that is training, with failures that come independently of each other (Daly, 2006)."""
    work = save_interval(save, mtbf)
    if work + save > 700 * mtbf:  # nothing ever ends; exp would overflow
        return 0.0
    return work / (mtbf * math.exp(restart / mtbf) * math.expm1((work + save) / mtbf))


REQUEST, READING = 50e-6, 15e-6
"""Seconds that the store needs for a request, and that a tower's Python needs for one tower's announcement."""

PACKET = 256.0
"""Bytes of an announcement of one tower."""

START_REQUESTS, START_BYTES = 7.0, 1900.0
"""Requests and bytes of one tower at the start (``scripts/bench control``)."""

HEARTBEATS = 128.0
"""The largest number of requests a second that towers make to say that they live."""


def handshake_seconds(towers: int) -> float:
    """Seconds of the store in which towers publish messages and read answers."""
    return START_REQUESTS * towers * REQUEST


def heartbeat_requests(towers: int) -> float:
    """Requests a second of all towers."""
    return min(towers, HEARTBEATS)


def announcement(cluster: Cluster) -> float:
    """Seconds of a call whose details differ, through a flat ring: N-1 messages, each as slow as the slowest link."""
    return (cluster.size - 1) * max(link.time(PACKET) for link in cluster.links(cluster.across))


USABLE = 0.8
"""Share of a nominal bandwidth that a program gets."""

HARDWARE = {
    "nvlink-400g": Cluster(
        *(1, 8, Link(3.4e-6, USABLE * 450e9), Link(14e-6, USABLE * 50e9), 8, 80e9),
        about="8 H100 (NVLink 450 GB/s each way), 8 adapters of 400 Gb/s",
    ),
    "nvlink-200g": Cluster(
        *(1, 8, Link(3.4e-6, USABLE * 300e9), Link(14e-6, USABLE * 25e9), 8, 80e9),
        about="8 A100 (NVLink 300 GB/s each way), 8 adapters of 200 Gb/s",
    ),
    "pcie-100g": Cluster(
        *(1, 8, Link(5.7e-6, USABLE * 32e9), Link(30e-6, USABLE * 12.5e9), 1, 40e9),
        about="8 GPUs on PCIe 4.0 x16 (32 GB/s), one adapter of 100 Gb/s, TCP",
    ),
}


def transformer(about: str, parameters: float, tied: float) -> Model:
    """16,384 tokens a device in bf16: 6 operations for each parameter and token, Adam in fp32 with a master copy.

    Backward is two thirds. Adam reads and writes 28 bytes for each parameter, and keeps 12.

    Args:
        tied: share of the parameters in an embedding that is also the head: its gradient is whole only at the end.
    """
    compute = 6 * parameters * 16384 / (0.4 * 989e12)
    return Model(
        gradients=2 * parameters,
        forward=compute / 3,
        backward=compute * 2 / 3,
        optimizer=28 * parameters / (USABLE * 3.35e12),
        batch=16384,
        spread=((tied, 0.0), (1 - tied, 1 - tied), (0.0, tied)) if tied else ((1.0, 1.0),),
        state=12 * parameters,
        noise=0.01,
        unit="tokens",
        about=f"transformer of {about} parameters in bf16, 16,384 tokens a device, an H100 at 40 % of its peak",
    )


def resnet50() -> Model:
    """25.6 million parameters in fp32; backward goes through head, stages 4 to 1 and stem."""
    optimizer = 5 * 102.2e6 / (USABLE * 2.0e12)
    compute = 128 / 2470 - optimizer
    times, sizes = (0.0005, 0.1979, 0.3581, 0.2513, 0.1633, 0.0289), (0.0802, 0.5855, 0.2777, 0.0477, 0.0084, 0.0005)
    return Model(
        *(102.2e6, compute / 3, compute * 2 / 3, optimizer, 128),
        spread=tuple(zip(times, sizes, strict=True)),
        state=102.2e6,
        noise=0.01,
        unit="images",
        about="ResNet-50, 102 MB of fp32 gradients, 128 images a device at an A100's 2,470 images/s",
    )


MODELS = {
    "resnet50": resnet50(),
    "transformer-1.3b": transformer("1.3 billion", 1.31e9, 0.079),
    "transformer-7b": transformer("6.7 billion", 6.74e9, 0.0),
}
