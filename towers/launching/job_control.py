"""Signals to a several-tower program act on all of it: Ctrl-Z and ``fg``, and being told to end."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any, Protocol

from towers.health.failure import EXIT_PREEMPTED


def stop_and_continue_together() -> None:
    """When this agent is suspended, suspend its towers; when it goes on, let them go on.

    torchrun's agent gives every tower a session of its own, which the terminal's stop signal does not reach.
    Linux only: elsewhere the towers run on while the agent is suspended.
    """

    def stop(_number: int, _frame: object) -> None:
        towers = _children()
        _signal_groups(towers, signal.SIGSTOP)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        try:
            os.kill(os.getpid(), signal.SIGTSTP)  # returns when this process is continued
        finally:  # another signal may have come with the one that continues
            signal.signal(signal.SIGTSTP, stop)
            _signal_groups(towers, signal.SIGCONT)

    signal.signal(signal.SIGTSTP, stop)


class Process(Protocol):
    """A process that was started, or is about to be."""

    @property
    def pid(self) -> int | None: ...


class PassedOn:
    """Within it, the first SIGTERM or SIGHUP goes on to the towers, which may save; a second one ends this process.

    Signals that the program handles itself, or ignores, are left to it.

    Args:
        towers: as many as have been started when the signal comes.
    """

    def __init__(self, towers: Sequence[Process]) -> None:
        self._towers = towers
        self._handled: list[signal.Signals] = []
        self._told: int | None = None

    def __enter__(self) -> PassedOn:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) == signal.SIG_DFL:
                    signal.signal(number, self._pass_on)
                    self._handled.append(number)
        return self

    def __exit__(self, *_: Any) -> None:
        for number in self._handled:
            signal.signal(number, signal.SIG_DFL)
        self._handled = []

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self._told = number
        self.__exit__()
        for tower in self._towers:
            with contextlib.suppress(ProcessLookupError):
                if tower.pid is not None:
                    os.kill(tower.pid, number)

    def end(self, *, preempted: bool) -> None:
        """End this process if it was told to, now that the towers have ended.

        Args:
            preempted: whether they have saved.
        """
        if self._told is not None:
            if preempted:
                sys.exit(EXIT_PREEMPTED)
            os.kill(os.getpid(), self._told)


def _children() -> list[int]:
    found: list[int] = []
    for path in pathlib.Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def _signal_groups(processes: list[int], number: int) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, number)
