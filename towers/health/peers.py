"""The known state of towers: a tower's status, the collective it waits in, and the others' view of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol

from towers.joining.store import Message


@dataclasses.dataclass(frozen=True)
class Status:
    """A tower's current activity.

    Attributes:
        run: the number of runs that have started, counted identically on all towers.
        step: the running training step, or the last one if none runs: the number that a checkpoint has.
        running: whether the last run still runs.
        evaluates: whether the run is not a training step.
        phase: the tower's phase; empty while it is in the script's own code.
        since: when the phase started, in ``clock.monotonic()`` seconds of its host.
        call: the collective that it is in, if that has a name.
        saving: whether it is writing a checkpoint.
        restores: whether its script restores the newest checkpoint when it is started again.
    """

    run: int = 0
    step: int = 0
    running: bool = False
    evaluates: bool = False
    phase: str = ""
    since: float = 0.0
    call: str = ""
    saving: bool = False
    restores: bool = False

    @property
    def is_between_runs(self) -> bool:
        """Whether no run is in progress, and there has been a run."""
        return self.run > 0 and not self.running

    @property
    def when(self) -> str:
        """The step, as part of a sentence."""
        if self.running and not self.evaluates:
            return f"in step {self.step}"
        when = f"after step {self.step}" if self.step else "before its first step"
        return f"in an evaluation {when}" if self.running else when

    def __str__(self) -> str:
        return ", ".join(filter(None, (self.when, self.phase, self.call and f"at {self.call}")))


@dataclasses.dataclass(frozen=True)
class PeerStatus:
    """One tower's view of another.

    Attributes:
        tower: the other tower.
        host: the other tower's host, if that is another host.
        status: its activity when it was last seen; None if it was never seen.
        seconds: for how long it has been doing that.
        silent: seconds since its last heartbeat. If that arrived through the store, only the time for which this tower
            has watched counts, because the clocks of hosts differ.
        stack: its main thread's stack, if it has answered a query.
        silence_limit: the number of silent seconds after which it counts as gone.
    """

    tower: int
    host: str = ""
    status: Status | None = None
    seconds: float = 0.0
    silent: float = 0.0
    stack: str = ""
    silence_limit: float = math.inf

    @property
    def lives(self) -> bool:
        """Whether it has answered, or had a recent heartbeat."""
        return bool(self.stack) or (self.status is not None and self.silent < self.silence_limit)

    def __str__(self) -> str:
        name = f"tower {self.tower}{self.host and f' on {self.host}'}"
        if self.status is None:
            return f"nothing is known of {name}"
        if self.lives:
            return f"{name} is {self.status}, for {self.seconds:.0f} s"
        return (
            f"{name} has sent no heartbeat for {self.silent:.0f} s (stopped, or its host is gone); it was last seen "
            f"{self.status}"
        )


class Peers(Protocol):
    """The other towers, which can be queried: :class:`towers.health.heartbeat.Heartbeat`."""

    def others(self) -> list[int]:
        """Returns all towers but this one."""

    def query(self, towers: Sequence[int], *, stacks: bool) -> list[PeerStatus]:
        """Returns the known state of other towers, with their answers if ``stacks`` is set."""

    def leave(self, name: str, message: Message) -> list[Message] | None:
        """Stores a last message under ``name``, and returns all towers' messages if this tower's is the last one."""


@dataclasses.dataclass(frozen=True)
class Wait:
    """A collective that a tower waits in.

    Attributes:
        communicator: its name, equal on all towers.
        number: the index of the collective among the communicator's.
        towers: the towers that take part in it.
    """

    communicator: str
    number: int
    towers: Sequence[int]
