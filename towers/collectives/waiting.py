"""What a tower that waits in vain says: for whom, and where that one is."""

from __future__ import annotations

from collections.abc import Sequence

from towers.errors import CollectiveTimeoutError, PeerLostError, waited_in_vain
from towers.health import Health
from towers.heartbeat import Sight

_SHOWN = 4  # towers of which a message tells


def timeout_error(health: Health, tower: int, seconds: float, whom: int | None = None) -> CollectiveTimeoutError:
    """The error of ``tower``, after a collective's deadline.

    Args:
        whom: the tower it waits for; None when its backend does not tell: then those that are elsewhere.
    """
    place, beat = health.place, health.heartbeat
    seen: list[Sight] = []
    if beat is not None:
        seen = beat.look([whom] if whom is not None else beat.others(), ask=True)
        if whom is None:
            here = (place.step, place.phase, place.call)
            seen = [
                s for s in seen if not s.lives or s.place is None or (s.place.step, s.place.phase, s.place.call) != here
            ]
    names = f"tower {whom}" if whom is not None else "the other towers"
    stacks = "\n".join(f"tower {sight.tower}, most recent call last:\n{sight.stack}" for sight in seen if sight.stack)
    return waited_in_vain(tower, seconds, names, str(place) if beat else "", _list(seen), stacks)


def connection_lost(health: Health, tower: int, error: Exception) -> PeerLostError:
    """The error of ``tower``, whose connection to some other has broken."""
    silent: list[Sight] = []
    if health.heartbeat is not None:
        silent = [sight for sight in health.heartbeat.look(health.heartbeat.others(), ask=True) if not sight.stack]
    first = (str(error).splitlines() or [""])[0]
    return PeerLostError(f"tower {tower} lost its connection to another tower in a collective ({first}){_then(silent)}")


def last_seen(health: Health, towers: Sequence[int]) -> str:
    """Where towers that have ended were last."""
    if health.heartbeat is None:
        return ""
    seen = health.heartbeat.look(towers, ask=False)
    return "".join(f"; tower {sight.tower} was last seen {sight.place}" for sight in seen[:_SHOWN] if sight.place)


def _then(seen: Sequence[Sight]) -> str:
    return f"; {_list(seen)}" if seen else ""


def _list(seen: Sequence[Sight]) -> str:
    more = [f"and {len(seen) - _SHOWN} more"] if len(seen) > _SHOWN else []
    return "; ".join([*map(str, seen[:_SHOWN]), *more])
