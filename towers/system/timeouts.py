"""The clock, deadlines, waits, and calls that may never return."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class Clock:
    """The clock of this process. All time in the product comes from :data:`clock`, which a test may replace.

    (One exception: a semaphore sleeps until a moment of the system's own clock.)
    """

    monotonic = staticmethod(time.monotonic)
    """Seconds that nobody sets, which all processes of a host share."""

    wall_time = staticmethod(time.time)
    """Seconds since 1970, which other hosts and file systems share, and which may be set."""

    sleep = staticmethod(time.sleep)


clock = Clock()


class Deadline:
    """The end of a wait.

    Args:
        seconds: from now on; infinite for a wait without end.
        longest: seconds between two looks at it. Where there are more, the process was suspended meanwhile (Ctrl-Z,
            SIGSTOP), and only so many count.
    """

    def __init__(self, seconds: float, longest: float = math.inf) -> None:
        self.seconds = seconds
        self._longest = longest
        self.restart()

    def restart(self) -> None:
        """The same seconds, from now on."""
        self._elapsed, self._before = 0.0, clock.monotonic()

    def elapsed(self) -> float:
        """The seconds that count since the start."""
        now = clock.monotonic()
        self._elapsed += min(now - self._before, self._longest)
        self._before = now
        return self._elapsed

    def remaining(self) -> float:
        """The seconds that are left; negative when the deadline has passed."""
        return self.seconds - self.elapsed()

    def has_passed(self) -> bool:
        """Whether no time is left."""
        return self.remaining() <= 0


def wait_until(done: Callable[[], bool], seconds: float, pause: float = 0.02) -> bool:
    """Wait until ``done()``, for so many seconds at most; returns whether it is.

    Args:
        pause: seconds between two looks.
    """
    deadline = Deadline(seconds)
    while not (is_done := done()) and not deadline.has_passed():
        clock.sleep(pause)
    return is_done


def run_with_timeout(seconds: float, call: Callable[[], T]) -> T:
    """Run ``call`` in a thread of its own; returns or raises what it does.

    Raises:
        TimeoutError: it had not returned after ``seconds``; its thread is left to itself.
    """
    result = run_all_with_timeout(seconds, [call])[0]
    if isinstance(result, BaseException):
        raise result
    return result


def in_time(seconds: float, call: Callable[[], T]) -> T | None:
    """The result of ``call``; None where it does not return in time, or raises an exception."""
    try:
        return run_with_timeout(seconds, call)
    except Exception:
        return None


def run_all_with_timeout(seconds: float, calls: Sequence[Callable[[], T]]) -> list[T | BaseException]:
    """Run all ``calls`` at once: what each returned or raised, or a TimeoutError where it has not returned."""
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
