"""A step that never ends: the tower says where it hangs, and ends, so that the others follow."""

from __future__ import annotations

import os
import threading
import time
import weakref

from towers import failure
from towers.errors import StepTimeoutError
from towers.health import Health
from towers.heartbeat import INTERVAL, main_stack


class StepDeadline:
    """Watches the steps of this tower from a thread.

    Args:
        health: of this tower; the watch ends with it.
        tower: its index.
        seconds: how long a step may take; infinite for no limit.
    """

    def __init__(self, health: Health, tower: int, seconds: float) -> None:
        self._health = weakref.ref(health)
        self._record = health.record
        self._tower = tower
        self._seconds = seconds
        threading.Thread(target=self._run, name="towers-step-deadline", daemon=True).start()

    def _run(self) -> None:
        pause = min(INTERVAL, self._seconds / 10)
        watched, spent, before = 0, 0.0, time.monotonic()
        while self._health() is not None:
            time.sleep(pause)
            self._record.give_sign()
            place, now = self._record.read(), time.monotonic()
            if not place.running or place.step != watched:
                watched, spent = place.step, 0.0
            else:
                spent += min(now - before, 2 * pause)  # while the whole job is suspended the watch stands still
            before = now
            if spent >= self._seconds:
                self._end(str(place))

    def _end(self, where: str) -> None:
        failure.leave_report(
            StepTimeoutError(
                f"tower {self._tower} has been in one step for {self._seconds:.0f} s, {where} "
                "(CommunicationOptions.step_timeout_seconds)"
            ),
            f"Stack (most recent call last):\n{main_stack()}\n",
        )
        os._exit(1)
