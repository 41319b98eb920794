"""Errors that end a training with parameter servers."""

from __future__ import annotations

from towers.errors import PeerLostError


class ServerLostError(PeerLostError):
    """Reports that a server has ended, together with its part of the variables. Restart from the newest checkpoint."""
