"""A step that never ends: the tower says where it hangs, and ends, so that the others follow."""

from __future__ import annotations

import os
import threading
import time
import weakref

from towers.errors import StepTimeoutError
from towers.health import failure
from towers.health.heartbeat import INTERVAL, main_stack
from towers.health.status import AVERAGING, Health
from towers.health.status_record import Record
from towers.health.timeout_messages import elsewhere, listed
from towers.system.elapsed import Patience

_HEAD_START = 3.0  # seconds


class StepDeadline:
    """Watches the steps of this tower from a thread.

    Args:
        health: of this tower; the watch ends with it.
        record: its record.
        tower: its index.
        seconds: how long a step may take; infinite for no limit.
    """

    def __init__(self, health: Health, record: Record, tower: int, seconds: float) -> None:
        self._health = weakref.ref(health)
        self._record = record
        self._tower = tower
        self._seconds = seconds
        threading.Thread(target=self._run, name="towers-step-deadline", daemon=True).start()

    def _run(self) -> None:
        pause = min(INTERVAL, self._seconds / 10)
        watched, patience = 0, Patience(self._seconds, 2 * pause)
        while self._health() is not None:
            time.sleep(pause)
            self._record.give_sign()
            place, left = self._record.read(), patience.spend()
            if not place.running or place.run != watched:
                watched, left = place.run, patience.start()
            # Who waits for others leaves it to those to say what they do.
            waits = place.phase == AVERAGING or bool(place.call)
            if left <= (-_HEAD_START if waits else 0.0):
                self._end(waits)

    def _end(self, waits: bool) -> None:
        health = self._health()
        assert health is not None
        trace = f"Stack (most recent call last):\n{main_stack()}\n"
        others = elsewhere(health, health.heartbeat, ask=waits) if health.heartbeat else []
        seen = f"; {listed(others)}" if others else ""
        failure.leave_report(
            StepTimeoutError(
                f"tower {self._tower} has been in one run for {self._seconds:.0f} s, {health.place}{seen} "
                "(CommunicationOptions.step_timeout_seconds)"
            ),
            trace,
        )
        os._exit(1)
