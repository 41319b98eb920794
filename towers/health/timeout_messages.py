"""Error messages for collectives that time out or lose a peer: which towers are in other calls, and their activity."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from towers.errors import CollectiveTimeoutError, PeerLostError, collective_timeout
from towers.health.flight_recorder import describe, entered
from towers.health.status import Health, Peers, PeerStatus, Status
from towers.system.messages import digest_of

_SHOWN = 4  # the largest number of towers that a message lists


def timeout_error(health: Health, tower: int, seconds: float, awaited: int | None = None) -> CollectiveTimeoutError:
    """Returns the error of ``tower`` after a collective's deadline.

    Args:
        awaited: the tower it waits for. None: its backend does not report it.
    """
    name = "the other towers" if awaited is None else f"tower {awaited}"
    if health.heartbeat is None:
        return collective_timeout(tower, seconds, name)
    activity, stacks = in_other_calls(health)  # the awaited tower may itself wait for one of these
    if not activity and awaited is not None:
        activity, stack = _in_words(health.heartbeat.query([awaited], stacks=True))
        stacks = _lines(stack, stacks)
    return collective_timeout(tower, seconds, name, str(health.status), activity, stacks)


def in_other_calls(health: Health, *, stacks: bool = True) -> tuple[str, str]:
    """Returns the activity and the stacks of towers that are in another call than this one, or are gone.

    With the stacks, it returns in which collectives of c10d the towers are (:mod:`towers.health.flight_recorder`).

    Args:
        stacks: whether to query their stacks, which takes seconds.
    """
    own = health.status

    def is_here(other: Status) -> bool:
        return (other.run, other.phase, other.call) == (own.run, own.phase, own.call)

    def look(others: Peers) -> tuple[str, str]:
        peers = others.query(others.others(), stacks=stacks, explains=lambda status: not is_here(status))
        elsewhere = [peer for peer in peers if not peer.lives or peer.status is None or not is_here(peer.status)]
        activity, found = _in_words(elsewhere)
        collectives = {others.tower: entered(), **{peer.tower: peer.collectives for peer in peers}} if stacks else {}
        return activity, _lines(found, describe(collectives))

    return _found_by_one(health, digest_of([own.run, own.phase, own.call, stacks]), look)


def connection_lost(health: Health, tower: int, error: Exception) -> PeerLostError:
    """Returns the error of ``tower``, which has lost its connection to some other tower."""

    def look(others: Peers) -> tuple[str, str]:
        peers = others.query(others.others(), stacks=True, explains=lambda status: False)
        return _in_words([peer for peer in peers if not peer.lives or (peer.asked and not peer.stack)])

    silent, _ = _found_by_one(health, "lost", look)
    reason = (str(error).splitlines() or [""])[0]
    listing = f"; {silent}" if silent else ""
    return PeerLostError(f"tower {tower} lost its connection to another tower in a collective ({reason}){listing}")


def _found_by_one(health: Health, question: str, look: Callable[[Peers], tuple[str, str]]) -> tuple[str, str]:
    """Returns the result of ``look``. If many towers have the same question, one looks for all of them."""
    others = health.heartbeat
    if others is None:
        return "", ""
    activity, stacks = others.first_result(question, lambda: list(look(others)))
    return activity, stacks


def last_seen(health: Health, towers: Sequence[int]) -> str:
    """Returns the last status of towers that have ended."""
    if health.heartbeat is None:
        return ""
    peers = health.heartbeat.query(towers, stacks=False)
    return "".join(f"; tower {peer.tower} was last seen {peer.status}" for peer in peers[:_SHOWN] if peer.status)


def _lines(*texts: str) -> str:
    return "\n".join(filter(None, texts))


def _in_words(peers: Sequence[PeerStatus]) -> tuple[str, str]:
    """Returns the activity of towers, as part of a sentence, and the stacks of those that have answered."""
    more = [f"and {len(peers) - _SHOWN} more"] if len(peers) > _SHOWN else []
    stacks = [f"tower {p.tower}, most recent call last:\n{p.stack}" for p in peers[:_SHOWN] if p.stack]
    return "; ".join([*map(str, peers[:_SHOWN]), *more]), "\n".join(stacks)
