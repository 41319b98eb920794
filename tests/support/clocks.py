"""Clocks that are set while a program runs."""

from __future__ import annotations

import threading

from tests.support.waiting import HANG


class Jumps:
    """A clock that is set by years, forth and back, whenever somebody looks at it."""

    def __init__(self) -> None:
        self.looks = 0

    def __call__(self) -> float:
        self.looks += 1
        return 2e9 if self.looks % 2 else 1.0


class Lockstep:
    """A clock that moves when the test sleeps, or joins one of the threads of a name.

    When it goes on, these threads have looked at every moment that they wanted to, and sleep or have ended.
    """

    def __init__(self, name: str) -> None:
        self._name, self._test = name, threading.current_thread()
        self._now, self._wakes = 0.0, dict[threading.Thread, float]()
        self._changed, self._join = threading.Condition(), threading.Thread.join

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        with self._changed:
            thread, end = threading.current_thread(), self._now + seconds
            if thread is not self._test:
                self._wakes[thread] = end
                self._changed.notify_all()
                assert self._changed.wait_for(lambda: self._now >= end, HANG)
                return
            self._await_sleepers()
            while self._now < end:
                self._now = min(end, *(moment for moment in self._wakes.values() if moment > self._now), end)
                self._changed.notify_all()
                self._await_sleepers()

    def _await_sleepers(self) -> None:
        while any(
            self._wakes.get(thread, -1) <= self._now for thread in threading.enumerate() if thread.name == self._name
        ):
            self._changed.wait(0.01)

    def join(self, thread: threading.Thread, timeout: float | None = None) -> None:
        """In place of ``threading.Thread.join``."""
        while thread.name == self._name and thread.is_alive():
            self.sleep(0.01)
        self._join(thread, timeout)
