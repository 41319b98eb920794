"""How towers live: who is there, how they start, communicate, average gradients and stay mirror images.

The layer below :mod:`mirrored`; it knows nothing of strategies, data or losses and can be used without them.
"""

from towers.errors import (
    CannotStartError,
    CollectiveTimeoutError,
    DeadlockError,
    DisagreementError,
    ForkedError,
    HandshakeError,
    MirrorError,
    NonFiniteGradientError,
    PeerLostError,
    PortInUseError,
    StartupError,
    TowerFailedError,
    TowersError,
)
from towers.launch import Failure, launch
from towers.topology import Topology

__all__ = [
    "CannotStartError",
    "CollectiveTimeoutError",
    "DeadlockError",
    "DisagreementError",
    "Failure",
    "ForkedError",
    "HandshakeError",
    "MirrorError",
    "NonFiniteGradientError",
    "PeerLostError",
    "PortInUseError",
    "StartupError",
    "Topology",
    "TowerFailedError",
    "TowersError",
    "launch",
]
