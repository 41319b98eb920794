"""Ctrl-Z and ``fg`` on a several-tower program act on all of it."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal


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
