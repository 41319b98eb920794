"""Deadlocks: towers that wait for each other in different collectives, of which none can go on.

[Note: deadlocks] Each communicator counts the collectives that its tower has begun, and a tower's heartbeats say in
which collective it waits. It waits for those towers of that collective that have not begun it. Where such waits form a
cycle, no tower in it can go on. While some tower keeps waiting, the chief's heartbeat thread reads everybody's
heartbeats and looks for a cycle. It counts when it was there at two heartbeats of all its towers, between which each
has been in the same wait. Then all towers raise the same ``DeadlockError``. A slow tower does not wait, so it is never
part of a cycle. Gloo is waited for in slices of half a second, between which a tower looks whether a deadlock has been
published.
"""

from __future__ import annotations

import dataclasses
import graphlib
from collections.abc import Mapping, Sequence
from typing import Any

from towers.errors import DECIDE_TOGETHER
from towers.health.peers import Status, Wait


@dataclasses.dataclass(frozen=True)
class Beat:
    """What a heartbeat of a tower says.

    Attributes:
        number: which of the tower's heartbeats it is.
        status: run, step, phase and collective.
        begun: by name of the communicator, how many collectives the tower has begun.
        wait: what it waits in; None where it does not wait.
    """

    number: int
    status: Status
    begun: Mapping[str, int]
    wait: Wait | None

    def as_json(self) -> dict[str, Any]:
        """JSON values that :meth:`from_json` reads."""
        wait = self.wait and {**dataclasses.asdict(self.wait), "towers": list(self.wait.towers)}
        return {**dataclasses.asdict(self), "begun": dict(self.begun), "wait": wait}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Beat:
        """The inverse of :meth:`as_json`.

        Raises:
            KeyError, TypeError: it is something else.
        """
        wait = Wait(**values["wait"]) if values["wait"] is not None else None
        return Beat(values["number"], Status(**values["status"]), values["begun"], wait)


def find_cycle(before: Mapping[int, Beat], now: Mapping[int, Beat]) -> list[int] | None:
    """Towers of which each waits for the next one, and the last for the first; None where there are none.

    Args:
        before, now: the towers' newest heartbeats at two times, the earlier one first.
    """
    stuck = {tower: wait for tower, beat in now.items() if (wait := _kept_waiting(before.get(tower), beat))}
    waits = graphlib.TopologicalSorter(dict.fromkeys(sorted(stuck), ()))
    for tower, wait in stuck.items():
        for other in wait.towers:
            if other != tower and other in stuck and now[other].begun.get(wait.communicator, wait.number) < wait.number:
                waits.add(other, tower)
    try:
        waits.prepare()
    except graphlib.CycleError as error:
        cycle: list[int] = error.args[1]  # the first tower comes last again
        return cycle[:-1]
    return None


def _kept_waiting(before: Beat | None, now: Beat) -> Wait | None:
    """The wait that a tower was in during all of the time between two heartbeats."""
    if before is None or before.number == now.number or before.wait != now.wait:
        return None
    return now.wait


def describe(cycle: Sequence[int], towers: Mapping[int, Beat]) -> str:
    """Which tower waits where, and for which one, and the call that was left out."""
    pairs = list(zip(cycle, [*cycle[1:], cycle[0]], strict=True))
    waits = "; ".join(f"tower {a} is {towers[a].status}, and waits for tower {b}" for a, b in pairs)
    left_out = [
        f"tower {b} has gone on without {_call(towers[a].status)}"
        for a, b in pairs
        if _progress(towers[a].status) < _progress(towers[b].status)
    ]
    reason = f": {'; '.join(left_out)}" if left_out else ""
    return (
        f"deadlock: {waits}. Every tower must make the same calls in the same order (run, backward, reduce, gather, "
        f"the next batch){reason}. {DECIDE_TOGETHER}"
    )


def _progress(status: Status) -> tuple[int, bool]:
    return status.run, not status.running


def _call(status: Status) -> str:
    call = status.call or status.phase or "its collective"
    return f"{call} {status.when}" if status.run else call
