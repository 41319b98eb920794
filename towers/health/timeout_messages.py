"""Error messages for collectives that time out or lose a peer: which towers are in other calls, and their activity."""

from __future__ import annotations

from collections.abc import Sequence

from towers.errors import CollectiveTimeoutError, PeerLostError, collective_timeout
from towers.health.status import Health, PeerStatus, Status

_SHOWN = 4  # the largest number of towers that a message lists


def timeout_error(health: Health, tower: int, seconds: float, awaited: int | None = None) -> CollectiveTimeoutError:
    """Returns the error of ``tower`` after a collective's deadline.

    Args:
        awaited: the tower it waits for. None: its backend does not report it.
    """
    name = "the other towers" if awaited is None else f"tower {awaited}"
    if health.heartbeat is None:
        return collective_timeout(tower, seconds, name)
    peers = in_other_calls(health)  # the awaited tower may itself wait for one of these
    if not peers and awaited is not None:
        peers = health.heartbeat.query([awaited], stacks=True)
    return collective_timeout(tower, seconds, name, str(health.status), listed(peers), stacks(peers))


def in_other_calls(health: Health, *, stacks: bool = True) -> list[PeerStatus]:
    """Returns the towers that are in another call than this one, or are gone.

    Args:
        stacks: whether to query their stacks, which takes seconds.
    """
    if health.heartbeat is None:
        return []
    own = health.status

    def is_here(other: Status) -> bool:
        return (other.run, other.phase, other.call) == (own.run, own.phase, own.call)

    others = health.heartbeat.others()
    peers = health.heartbeat.query(others, stacks=stacks, explains=lambda status: not is_here(status))
    return [peer for peer in peers if not peer.lives or peer.status is None or not is_here(peer.status)]


def connection_lost(health: Health, tower: int, error: Exception) -> PeerLostError:
    """Returns the error of ``tower``, which has lost its connection to some other tower."""
    silent: list[PeerStatus] = []
    if health.heartbeat is not None:
        peers = health.heartbeat.query(health.heartbeat.others(), stacks=True, explains=lambda status: False)
        silent = [peer for peer in peers if not peer.lives or (peer.asked and not peer.stack)]
    reason = (str(error).splitlines() or [""])[0]
    listing = f"; {listed(silent)}" if silent else ""
    return PeerLostError(f"tower {tower} lost its connection to another tower in a collective ({reason}){listing}")


def last_seen(health: Health, towers: Sequence[int]) -> str:
    """Returns the last status of towers that have ended."""
    if health.heartbeat is None:
        return ""
    peers = health.heartbeat.query(towers, stacks=False)
    return "".join(f"; tower {peer.tower} was last seen {peer.status}" for peer in peers[:_SHOWN] if peer.status)


def listed(peers: Sequence[PeerStatus]) -> str:
    """Returns the activity of towers, as part of a sentence."""
    more = [f"and {len(peers) - _SHOWN} more"] if len(peers) > _SHOWN else []
    return "; ".join([*map(str, peers[:_SHOWN]), *more])


def stacks(peers: Sequence[PeerStatus]) -> str:
    """Returns the stacks of towers that have answered."""
    return "\n".join(f"tower {p.tower}, most recent call last:\n{p.stack}" for p in peers[:_SHOWN] if p.stack)
