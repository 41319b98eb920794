"""What a tower that waits in vain says: for whom, and where that one is."""

from __future__ import annotations

from collections.abc import Sequence

from towers.errors import CollectiveTimeoutError, PeerLostError, waited_in_vain
from towers.health.heartbeat import Heartbeat, Sight
from towers.health.status import Health
from towers.health.status_record import Place

_SHOWN = 4  # towers of which a message tells


def timeout_error(health: Health, tower: int, seconds: float, whom: int | None = None) -> CollectiveTimeoutError:
    """The error of ``tower``, after a collective's deadline.

    Args:
        whom: the tower it waits for; None when its backend does not tell.
    """
    if health.heartbeat is None:
        return waited_in_vain(tower, seconds, _name(whom))
    seen = health.heartbeat.look([whom], ask=True) if whom is not None else elsewhere(health, health.heartbeat)
    return waited_in_vain(tower, seconds, _name(whom), str(health.place), listed(seen), stacks(seen))


def elsewhere(health: Health, heartbeat: Heartbeat, *, ask: bool = True) -> list[Sight]:
    """The towers that are not where this one is.

    Args:
        ask: ask them for their stacks, which takes seconds.
    """
    place = health.place

    def is_here(other: Place) -> bool:
        return (other.run, other.phase, other.call) == (place.run, place.phase, place.call)

    seen = heartbeat.look(heartbeat.others(), ask=ask)
    return [sight for sight in seen if not sight.lives or sight.place is None or not is_here(sight.place)]


def connection_lost(health: Health, tower: int, error: Exception) -> PeerLostError:
    """The error of ``tower``, whose connection to some other has broken."""
    silent: list[Sight] = []
    if health.heartbeat is not None:
        silent = [sight for sight in health.heartbeat.look(health.heartbeat.others(), ask=True) if not sight.stack]
    first = (str(error).splitlines() or [""])[0]
    said = f"; {listed(silent)}" if silent else ""
    return PeerLostError(f"tower {tower} lost its connection to another tower in a collective ({first}){said}")


def last_seen(health: Health, towers: Sequence[int]) -> str:
    """Where towers that have ended were last."""
    if health.heartbeat is None:
        return ""
    seen = health.heartbeat.look(towers, ask=False)
    return "".join(f"; tower {sight.tower} was last seen {sight.place}" for sight in seen[:_SHOWN] if sight.place)


def listed(seen: Sequence[Sight]) -> str:
    """Where towers are, as part of a sentence."""
    more = [f"and {len(seen) - _SHOWN} more"] if len(seen) > _SHOWN else []
    return "; ".join([*map(str, seen[:_SHOWN]), *more])


def stacks(seen: Sequence[Sight]) -> str:
    """What towers do."""
    return "\n".join(f"tower {s.tower}, most recent call last:\n{s.stack}" for s in seen[:_SHOWN] if s.stack)


def _name(tower: int | None) -> str:
    return "the other towers" if tower is None else f"tower {tower}"
