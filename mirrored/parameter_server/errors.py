"""What ends a training with parameter servers."""

from __future__ import annotations

from towers.errors import PeerLostError


class ServerLostError(PeerLostError):
    """A server has ended, and its part of the variables with it: start again, from the newest checkpoint."""
