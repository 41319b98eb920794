"""What connects devices: links inside a host and across hosts, as latency and bandwidth (Hockney, 1994).

A message of n bytes takes ``latency + n / bandwidth``. Units everywhere in this folder: seconds and bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Link:
    """One way from a device (or a network adapter) to the next; it sends and receives at the same time.

    Attributes:
        latency: seconds that the smallest message takes, software included.
        bandwidth: bytes per second in one direction that a program really gets.
    """

    latency: float
    bandwidth: float

    def time(self, nbytes: float) -> float:
        """Seconds of a message of ``nbytes``."""
        return self.latency + nbytes / self.bandwidth

    def shared(self, factor: float) -> Link:
        """The same link where a device has ``factor`` times its bandwidth."""
        return replace(self, bandwidth=self.bandwidth * factor)


@dataclass(frozen=True)
class Cluster:
    """W hosts with L devices each.

    Attributes:
        hosts, devices: W, and L in each host.
        inside: what one device has towards the others of its host.
        across: what one network adapter has towards other hosts.
        adapters: network adapters of a host, shared by its devices.
    """

    hosts: int
    devices: int
    inside: Link
    across: Link
    adapters: int = 1

    def __post_init__(self) -> None:
        if min(self.hosts, self.devices, self.adapters) < 1:
            raise ValueError("a cluster has at least one host, one device in each, and one adapter")

    @property
    def size(self) -> int:
        """How many devices there are: N."""
        return self.hosts * self.devices

    @property
    def host_across(self) -> Link:
        """All adapters of a host as one link."""
        return self.across.shared(self.adapters)
