"""What is known of a tower: its status, the collective it waits in, and what the other towers know of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol

from towers.joining.store import Message


@dataclasses.dataclass(frozen=True)
class Status:
    """What a tower does.

    Attributes:
        run: how many runs have begun, which counts alike on all towers.
        step: the training step that runs, else the last one; the number that a checkpoint has.
        running: whether the last run goes on.
        evaluates: whether the run is none of training.
        phase: what the tower does there; empty where it is in the script's own code.
        since: when it began with that, in ``clock.monotonic()`` seconds of its host.
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
        """Whether no run goes on, and there was one."""
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
    """What one tower knows of another.

    Attributes:
        tower: the other.
        host: where it runs, if that is another host.
        status: what it does, or did when it was last seen; None when it was never seen.
        seconds: for how long it has been doing that.
        silent: seconds since its last heartbeat; where that came through the store, as far as this tower has watched,
            for the clocks of hosts differ.
        stack: its main thread's, if it has answered a query.
        silence_limit: after so many silent seconds it counts as gone.
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
        """Whether it has answered, or had a heartbeat a moment ago."""
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
        """All towers but this one."""

    def query(self, towers: Sequence[int], *, stacks: bool) -> list[PeerStatus]:
        """What is known of other towers, and with ``stacks`` what they answer."""

    def leave(self, name: str, message: Message) -> list[Message] | None:
        """Store a last message under ``name``; returns all towers' messages, if this tower's is the last one."""


@dataclasses.dataclass(frozen=True)
class Wait:
    """A collective that a tower waits in.

    Attributes:
        communicator: its name, equal on all towers.
        number: which of the communicator's collectives it is.
        towers: those that take part in it.
    """

    communicator: str
    number: int
    towers: Sequence[int]
