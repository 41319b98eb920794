"""Calls that the system may keep waiting, and that nobody can end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


class _Call(Generic[T]):
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], T]) -> None:
        self._call = call
        self._outcome: list[T | BaseException] = []
        self.thread = threading.Thread(target=self._run, name="towers-within", daemon=True)
        self.thread.start()

    def outcome(self) -> T | BaseException:
        """What it returned or raised, when the thread has ended."""
        return self._outcome[0]

    def _run(self) -> None:
        try:
            self._outcome.append(self._call())
        except BaseException as error:
            self._outcome.append(error)


def within(seconds: float, call: Callable[[], T]) -> T:
    """What ``call`` returns or raises.

    Raises:
        TimeoutError: it had not come back after ``seconds``; its thread is left to itself.
    """
    result = all_within(seconds, [call])[0]
    if isinstance(result, BaseException):
        raise result
    return result


def all_within(seconds: float, calls: Sequence[Callable[[], T]]) -> list[T | BaseException]:
    """What each of ``calls``, all at once, returned or raised; a TimeoutError for those that had not come back."""
    started = [_Call(call) for call in calls]
    deadline = time.monotonic() + seconds
    found: list[T | BaseException] = []
    for call in started:
        call.thread.join(max(0.0, deadline - time.monotonic()))
        late = call.thread.is_alive()
        found.append(TimeoutError(f"no answer within {seconds:.0f} s") if late else call.outcome())
    return found
