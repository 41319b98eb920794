"""Deadlines: time that leaves out suspensions, waits, and calls that may never return."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


class Countdown:
    """Seconds of waiting, without those in which the process was suspended (Ctrl-Z, SIGSTOP).

    Args:
        seconds: how many; infinite for no limit.
        longest: seconds between two calls of :meth:`remaining`. After a longer pause, in which the process was
            suspended, only so many count.
    """

    def __init__(self, seconds: float, longest: float) -> None:
        self._seconds = seconds
        self._longest = longest
        self.start()

    def start(self) -> float:
        """Count from now on; returns all the seconds."""
        self._spent, self._before = 0.0, time.monotonic()
        return self._seconds

    def remaining(self) -> float:
        """The seconds that are left, below 0 where there are none. To be called again and again."""
        now = time.monotonic()
        self._spent += min(now - self._before, self._longest)
        self._before = now
        return self._seconds - self._spent


def wait_until(done: Callable[[], bool], seconds: float, pause: float = 0.02) -> None:
    """Wait until ``done()``, for so many seconds at most.

    Args:
        pause: seconds between two looks.
    """
    end = time.monotonic() + seconds
    while not done() and time.monotonic() < end:
        time.sleep(pause)


def run_with_timeout(seconds: float, call: Callable[[], T]) -> T:
    """What ``call`` returns or raises, which runs in a thread of its own.

    Raises:
        TimeoutError: it had not returned after ``seconds``; its thread is left to itself.
    """
    result = run_all_with_timeout(seconds, [call])[0]
    if isinstance(result, BaseException):
        raise result
    return result


def in_time(seconds: float, call: Callable[[], T]) -> T | None:
    """What ``call`` returns, if it does so in time; None where it does not, or raises an exception."""
    try:
        return run_with_timeout(seconds, call)
    except Exception:
        return None


def run_all_with_timeout(seconds: float, calls: Sequence[Callable[[], T]]) -> list[T | BaseException]:
    """What each of ``calls``, all at once, returned or raised; a TimeoutError for those that have not returned."""
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
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = TimeoutError(f"no answer within {seconds:.0f} s")
    return [late if thread.is_alive() else results[number] for number, thread in enumerate(threads)]
