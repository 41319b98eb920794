"""What the agent and ``launch`` have in common: variables of a tower, signals to its process, and its end."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from towers.health.failure import EXIT_PREEMPTED, report_path
from towers.health.status import StatusRecord, record_path
from towers.system.timeouts import wait_until
from towers.topology import ERROR_FILE, STATUS_RECORD


def file_variables(directory: pathlib.Path, tower: int) -> dict[str, str]:
    """Environment variables with the files that a tower writes for the process that starts it.

    Args:
        directory: that process's own.
    """
    return {ERROR_FILE: str(report_path(directory, tower)), STATUS_RECORD: str(record_path(directory, tower))}


def towers_saving(directory: str | os.PathLike[str], towers: Iterable[int]) -> list[int]:
    """Those of ``towers`` that are writing a checkpoint."""
    records = {tower: StatusRecord.find(directory, tower) for tower in towers}
    return [tower for tower, record in records.items() if record is not None and record.saving]


def send(number: int, processes: Iterable[int], *, groups: bool = False) -> None:
    """Send a signal to those of ``processes`` that there still are.

    Args:
        groups: also to the processes that they have started, in their process groups.
    """
    for process in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            (os.killpg if groups else os.kill)(process, number)


def end(
    send_all: Callable[[int], None], all_ended: Callable[[], bool], seconds: float, number: int = signal.SIGTERM
) -> None:
    """End towers: ask them to by a signal, and kill them when they have not ended after ``seconds``.

    Args:
        send_all: sends a signal to them.
        all_ended: whether they have ended.
        number: the first signal.
    """
    for numbers in ((number, signal.SIGCONT), (signal.SIGKILL,)):  # a stopped process hears it when it goes on
        for each in numbers:
            send_all(each)
        wait_until(all_ended, seconds)


class SignalForwarding:
    """Within it, the first SIGTERM or SIGHUP goes to the towers, which may save; a second one ends this process.

    Signals that the program handles itself, or ignores, are left to it.

    Args:
        processes: the towers' processes that there are when the signal comes.
    """

    def __init__(self, processes: Callable[[], Iterable[int]]) -> None:
        self._processes = processes
        self._handled: list[signal.Signals] = []
        self._forwarded: int | None = None

    def __enter__(self) -> SignalForwarding:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) == signal.SIG_DFL:
                    signal.signal(number, self._forward)
                    self._handled.append(number)
        return self

    def __exit__(self, *_: Any) -> None:
        for number in self._handled:
            signal.signal(number, signal.SIG_DFL)
        self._handled = []

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        self._forwarded = number
        self.__exit__()
        send(number, self._processes())

    def end(self, *, preempted: bool) -> None:
        """End this process if a signal was forwarded, now that the towers have ended.

        Args:
            preempted: whether they have saved.
        """
        if self._forwarded is not None:
            if preempted:
                sys.exit(EXIT_PREEMPTED)
            os.kill(os.getpid(), self._forwarded)
