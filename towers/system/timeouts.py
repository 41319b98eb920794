"""The clock, deadlines, waits, and calls that may never return."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class Clock:
    """The clock of this process. All time in the product is read from :data:`clock`, which a test may replace.

    (One exception: a semaphore sleeps until a moment of the system's own clock.)
    """

    monotonic = staticmethod(time.monotonic)
    """Seconds of a clock that cannot be set, which all processes of a host share."""

    wall_time = staticmethod(time.time)
    """Seconds since 1970, which other hosts and file systems share, and which may be set."""

    sleep = staticmethod(time.sleep)


clock = Clock()


class Deadline:
    """The end of a wait.

    Args:
        seconds: from now on; infinite for a wait without end.
        longest: the largest number of seconds that counts between two reads. If more have passed, the process was
            suspended in between (Ctrl-Z, SIGSTOP).
    """

    def __init__(self, seconds: float, longest: float = math.inf) -> None:
        self.seconds = seconds
        self._longest = longest
        self.restart()

    def restart(self) -> None:
        """Starts the same number of seconds again."""
        self._elapsed, self._before = 0.0, clock.monotonic()

    def elapsed(self) -> float:
        """Returns the seconds since the start that count."""
        now = clock.monotonic()
        self._elapsed += min(now - self._before, self._longest)
        self._before = now
        return self._elapsed

    def remaining(self) -> float:
        """Returns the remaining seconds, which are negative after the deadline."""
        return self.seconds - self.elapsed()

    def has_passed(self) -> bool:
        """Returns whether no time is left."""
        return self.remaining() <= 0


def wait_until(done: Callable[[], bool], seconds: float, pause: float = 0.02) -> bool:
    """Waits until ``done()`` is true, for at most ``seconds``, and returns whether it is.

    Args:
        pause: seconds between two checks.
    """
    deadline = Deadline(seconds)
    while not (is_done := done()) and not deadline.has_passed():
        clock.sleep(pause)
    return is_done


def run_with_timeout(seconds: float, call: Callable[[], T]) -> T:
    """Runs ``call`` in a new thread, and returns its result or raises its exception.

    Raises:
        TimeoutError: it had not returned after ``seconds``. Its thread continues.
    """
    result = run_all_with_timeout(seconds, [call])[0]
    if isinstance(result, BaseException):
        raise result
    return result


def in_time(seconds: float, call: Callable[[], T]) -> T | None:
    """Returns the result of ``call``, or None if it does not return in time or raises an exception."""
    try:
        return run_with_timeout(seconds, call)
    except Exception:
        return None


def run_all_with_timeout(seconds: float, calls: Sequence[Callable[[], T]]) -> list[T | BaseException]:
    """Runs all ``calls`` in parallel. Returns each result or exception, or a TimeoutError for a late call."""
    results: dict[int, T | BaseException] = {}

    def run(number: int) -> None:
        try:
            results[number] = calls[number]()
        except BaseException as error:
            results[number] = error

    threads = [
        threading.Thread(target=run, args=(number,), name="towers-timeout", daemon=True) for number in range(len(calls))
    ]
    for thread in threads:
        thread.start()
    deadline = Deadline(seconds)
    for thread in threads:
        thread.join(max(0.0, deadline.remaining()))
    late = TimeoutError(f"no answer within {seconds:.0f} s")
    return [late if thread.is_alive() else results[number] for number, thread in enumerate(threads)]
