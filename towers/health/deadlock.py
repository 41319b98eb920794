"""Deadlocks: towers that wait for each other in different collectives, of which none can go on.

A tower that waits in a collective waits for those of its towers that have not begun it: each communicator counts the
collectives that its tower has begun. Where such waits form a cycle, nobody in it can go on. What is known of a tower
comes with its heartbeats. Two of each tower, between which it has been in the same wait, show that all waits of the
cycle were there at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from towers.errors import DECIDE_TOGETHER
from towers.health.status_record import Place


@dataclasses.dataclass(frozen=True)
class Wait:
    """A collective that a tower waits in.

    Attributes:
        communicator: its name, equal on all towers.
        number: which of the communicator's collectives it is.
        towers: who takes part in it.
    """

    communicator: str
    number: int
    towers: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Standing:
    """Where a tower was at a heartbeat.

    Attributes:
        beat: the heartbeat's number.
        place: run, step, phase and collective.
        begun: by name of the communicator, how many collectives the tower has begun.
        wait: what it waits in; None where it does not wait.
    """

    beat: int
    place: Place
    begun: Mapping[str, int]
    wait: Wait | None

    def as_json(self) -> dict[str, Any]:
        """JSON values that :func:`from_json` reads."""
        wait = self.wait and {**dataclasses.asdict(self.wait), "towers": list(self.wait.towers)}
        return {"beat": self.beat, "place": dataclasses.asdict(self.place), "begun": dict(self.begun), "wait": wait}


def from_json(said: Mapping[str, Any]) -> Standing:
    """What :meth:`Standing.as_json` has given.

    Raises:
        KeyError, TypeError: it is something else.
    """
    wait = Wait(**said["wait"]) if said["wait"] is not None else None
    return Standing(said["beat"], Place(**said["place"]), said["begun"], wait)


def find(before: Mapping[int, Standing], now: Mapping[int, Standing]) -> list[int] | None:
    """Towers of which each waits for the next one, and the last for the first; None where nobody is stuck so.

    Args:
        before, now: what was known of the towers at two times, the earlier one first.
    """
    stuck = {tower: wait for tower, there in now.items() if (wait := _kept_waiting(before.get(tower), there))}
    waits_for = {
        tower: [
            other
            for other in wait.towers
            if other != tower and other in stuck and now[other].begun.get(wait.communicator, wait.number) < wait.number
        ]
        for tower, wait in stuck.items()
    }
    while free := [tower for tower, others in waits_for.items() if not others]:
        waits_for = {
            tower: [other for other in others if other not in free]
            for tower, others in waits_for.items()
            if tower not in free
        }
    if not waits_for:
        return None
    path = [min(waits_for)]
    while (following := waits_for[path[-1]][0]) not in path:
        path.append(following)
    return path[path.index(following) :]


def _kept_waiting(before: Standing | None, now: Standing) -> Wait | None:
    """The wait that a tower was in during all of the time between two heartbeats."""
    if before is None or before.beat == now.beat or before.wait != now.wait:
        return None
    return now.wait


def describe(cycle: Sequence[int], towers: Mapping[int, Standing]) -> str:
    """Who waits where, for whom, and what was left out."""
    pairs = list(zip(cycle, [*cycle[1:], cycle[0]], strict=True))
    waits = "; ".join(f"tower {one} is {towers[one].place}, and waits for tower {other}" for one, other in pairs)
    left_out = [
        f"tower {other} has gone on without {_call(towers[one].place)}"
        for one, other in pairs
        if _progress(towers[one].place) < _progress(towers[other].place)
    ]
    reason = f": {'; '.join(left_out)}" if left_out else ""
    return (
        f"deadlock: {waits}. Every tower must make the same calls in the same order (run, backward, reduce, gather, "
        f"the next batch){reason}. {DECIDE_TOGETHER}"
    )


def _progress(place: Place) -> tuple[int, bool]:
    return place.run, not place.running


def _call(place: Place) -> str:
    what = place.call or place.phase or "its collective"
    return f"{what} {place.when}" if place.run else what
