"""Time of a training step: backward and the buckets' collectives beside it, simulated bucket by bucket."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

from cluster import Cluster
from collectives import ALGORITHMS, half

FIRST_BUCKET = float(2**20)
"""Bytes of the first bucket, as in ``towers/gradients/buckets.py``: small, so that the first collective starts
early."""

EVEN = ((1.0, 1.0),)
"""A backward in which gradients come at one rate."""


@dataclass(frozen=True)
class Model:
    """What one device computes in a step, and what it has to exchange.

    Attributes:
        gradients: bytes of all gradients.
        forward, backward, optimizer: seconds of a step's phases on one device, alone.
        batch: examples (or sequences) of one device's share, for which these times hold.
        bucket: bytes of a bucket.
        spread: pieces of backward in its order, as (share of its time, share of the gradients' bytes).
        parameters: bytes that an all-gather of the parameters moves; None: as many as the gradients.
        state: bytes of the optimizer's state, with a master copy where there is one.
        noise: standard deviation of forward + backward between devices, as a share of it.
    """

    gradients: float
    forward: float
    backward: float
    optimizer: float = 0.0
    batch: float = 1.0
    bucket: float = 25.0 * 2**20
    spread: tuple[tuple[float, float], ...] = EVEN
    parameters: float | None = None
    state: float = 0.0
    noise: float = 0.0

    @property
    def compute(self) -> float:
        """Seconds of a step without any other device."""
        return self.forward + self.backward + self.optimizer

    @property
    def gathered(self) -> float:
        """Bytes of the parameters."""
        return self.gradients if self.parameters is None else self.parameters

    def with_batch(self, batch: float) -> Model:
        """The same model with another share: forward and backward in proportion, the optimizer as before."""
        factor = batch / self.batch
        return replace(self, batch=batch, forward=self.forward * factor, backward=self.backward * factor)


@dataclass(frozen=True)
class Bucket:
    """Seconds after the start of backward at which a bucket is full, and its bytes."""

    ready: float
    nbytes: float


def buckets(model: Model) -> list[Bucket]:
    """Cut the gradients, in the order in which backward brings them."""
    sizes: list[float] = []
    left = model.gradients
    while left > 0:
        size = min(left, model.bucket, FIRST_BUCKET) if not sizes else min(left, model.bucket)
        sizes.append(size)
        left -= size
    ends = list(itertools.accumulate(sizes))
    if ends:
        ends[-1] = model.gradients
    return [Bucket(ready(model, end), size) for end, size in zip(ends, sizes, strict=True)]


def ready(model: Model, nbytes: float) -> float:
    """Seconds after the start of backward at which the first ``nbytes`` of gradients are there."""
    time = arrived = 0.0
    for share_of_time, share_of_bytes in model.spread:
        here = share_of_bytes * model.gradients
        if here > 0 and arrived + here >= nbytes * (1 - 1e-12):
            return (time + share_of_time * (nbytes - arrived) / here) * model.backward
        time, arrived = time + share_of_time, arrived + here
    return model.backward


def finish(queue: Sequence[Bucket], collective: Callable[[float], float]) -> float:
    """Seconds after the start of backward at which the last bucket has been reduced, one collective at a time."""
    free = 0.0
    for bucket in queue:
        free = max(free, bucket.ready) + collective(bucket.nbytes)
    return free


@dataclass(frozen=True)
class Step:
    """One step's seconds.

    Attributes:
        compute: without any other device.
        communication: of all collectives, hidden or not.
        exposed: of it, what is not hidden behind backward.
        straggling: expected wait for the slowest device.
    """

    compute: float
    communication: float
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


def step(model: Model, cluster: Cluster, algorithm: str, *, overlapped: bool = True) -> Step:
    """A step with one of :data:`collectives.ALGORITHMS`.

    Args:
        overlapped: False where a collective needs the core that computes; then all follow backward.
    """

    def collective(nbytes: float) -> float:
        return ALGORITHMS[algorithm](cluster, nbytes) if cluster.size > 1 else 0.0

    return _step(model, cluster, collective, overlapped, model.compute, 0.0)


def sharded_step(model: Model, cluster: Cluster, *, overlapped: bool = True) -> Step:
    """A step in which each device updates 1/N of the parameters only.

    Reduce-scatter instead of all-reduce beside backward, 1/N of the optimizer's time and state, then an all-gather of
    the parameters, which nothing hides (ZeRO's first two stages: Rajbhandari et al., 2020).
    """
    gather = half(cluster, model.gathered) if cluster.size > 1 else 0.0
    compute = model.forward + model.backward + model.optimizer / cluster.size
    return _step(model, cluster, lambda nbytes: half(cluster, nbytes), overlapped, compute, gather)


def _step(
    model: Model,
    cluster: Cluster,
    collective: Callable[[float], float],
    overlapped: bool,
    compute: float,
    afterwards: float,
) -> Step:
    queue = buckets(model)
    communication = sum(collective(bucket.nbytes) for bucket in queue)
    exposed = communication
    if overlapped:
        exposed = max(0.0, finish(queue, collective) - model.backward) if cluster.size > 1 else 0.0
    spread = model.noise * (model.forward + model.backward)
    return Step(compute, communication + afterwards, exposed + afterwards, spread * slowest_of(cluster.size))


def slowest_of(count: int) -> float:
    """Expected maximum of ``count`` normal variables, in standard deviations.

    Blom's approximation (1958), within 0.03 of the exact value; it grows like sqrt(2 ln N), which is an upper bound.
    """
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))
