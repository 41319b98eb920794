"""Deadlocks: towers that wait for each other in different calls, so that none can continue.

[Note: deadlocks] Each communicator counts the collectives that its tower has started, and a tower's heartbeats contain
the collective in which it waits. The tower waits for those towers of that collective that have not started it. If such
waits form a cycle, no tower in it can continue. While some tower keeps waiting, the chief's heartbeat thread reads all
towers' heartbeats and looks for a cycle. A cycle counts if it exists at two heartbeats of all its towers, between which
each tower has been in the same wait. Then all towers raise the same ``DeadlockError``. A slow tower does not wait, so
it is never part of a cycle. A tower waits for Gloo in slices of half a second, and checks between them whether a
deadlock has been published.

A tower whose host waits for its own GPU is in no such wait. So heartbeats also contain the last numbered calls
(:class:`towers.collectives.agreement.RepeatedCalls`). If two towers have made different calls under the same number,
neither will make the other's.
"""

from __future__ import annotations

import dataclasses
import graphlib
from collections.abc import Mapping, Sequence
from typing import Any

from towers.errors import DECIDE_TOGETHER
from towers.health.status import Status, Wait


@dataclasses.dataclass(frozen=True)
class Beat:
    """The content of a tower's heartbeat.

    Attributes:
        number: the index of this heartbeat among the tower's.
        status: run, step, phase and collective.
        begun: the number of collectives that the tower has started, by name of the communicator.
        wait: the collective that it waits in. None: it does not wait.
        calls: the newest numbered calls, each with its number.
    """

    number: int
    status: Status
    begun: Mapping[str, int]
    wait: Wait | None
    calls: Sequence[Sequence[Any]] = ()

    def as_json(self) -> dict[str, Any]:
        """Returns JSON values that :meth:`from_json` reads."""
        wait = self.wait and {**dataclasses.asdict(self.wait), "towers": list(self.wait.towers)}
        return {**dataclasses.asdict(self), "begun": dict(self.begun), "wait": wait}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> Beat:
        """Returns the heartbeat from the result of :meth:`as_json`.

        Raises:
            KeyError, TypeError: ``values`` is something else.
        """
        wait = Wait(**values["wait"]) if values["wait"] is not None else None
        return Beat(values["number"], Status(**values["status"]), values["begun"], wait, values["calls"])


def find_cycle(before: Mapping[int, Beat], now: Mapping[int, Beat]) -> list[int] | None:
    """Returns towers that each wait for the next one, and the last for the first; or None if there are none.

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
        cycle: list[int] = error.args[1]  # the first tower is repeated at the end
        return cycle[:-1]
    return None


def find_different_calls(towers: Mapping[int, Beat]) -> str | None:
    """Returns a message on two towers that have made different calls under the same number, or None."""
    calls: dict[int, tuple[int, str]] = {}
    for tower, beat in sorted(towers.items()):
        for number, call in beat.calls:
            other, others = calls.setdefault(number, (tower, call))
            if call != others:
                return (
                    f"the towers made different calls: tower {other} {others}, tower {tower} {call} ({beat.status}); "
                    f"every tower must make the same calls in the same order. {DECIDE_TOGETHER}"
                )
    return None


def _kept_waiting(before: Beat | None, now: Beat) -> Wait | None:
    """Returns the wait in which a tower was during all of the time between two heartbeats, or None."""
    if before is None or before.number == now.number or before.wait != now.wait:
        return None
    return now.wait


def describe(cycle: Sequence[int], towers: Mapping[int, Beat]) -> str:
    """Returns a message on where each tower waits and for which one, and the call that was left out."""
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
