"""One worker: this machine alone."""

from __future__ import annotations

from mirrored.cluster.resolver import ClusterResolver


class LocalClusterResolver(ClusterResolver):
    """A cluster of one worker, with as many towers as it has devices."""

    def __init__(self, origin: str = "this machine") -> None:
        self.origin = origin
