"""Towers: starting them, communication, averages of gradients, comparison of their models, and their end.

This is the layer below :mod:`mirrored`. It does not depend on strategies, data or losses, and can be used without them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from towers.topology import Topology

if TYPE_CHECKING:
    from towers.launching.starting.launch import Failure, launch

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

if not TYPE_CHECKING:  # otherwise, a type checker would accept any name

    def __getattr__(name):
        """Imports ``towers.launch`` and ``towers.Failure`` on first use, because errors do not need a launcher."""
        if name not in ("Failure", "launch"):
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from towers.launching.starting import launch as module

        return getattr(module, name)
