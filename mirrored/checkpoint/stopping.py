"""Preemption: a SIGTERM, SIGINT or SIGHUP on any tower stops all towers at the same step.

All towers learn of the signal through :class:`towers.collectives.agreement.StepRequests`. A second signal has its
default effect, which also ends a process that does not return to Python code.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

from towers.health import failure
from towers.launching.console import leave_terminal


class StopSignals:
    """A context that records the first signal. A second signal, or the end of the grace period, ends the process.

    Signals that the parent process ignored stay ignored. Outside the main thread, no signal is handled.

    Args:
        signals: the signals to handle.
        grace: seconds from the first signal to the end of the process, if it has not ended before.

    Attributes:
        is_entered: whether the context is entered.
        received: the first signal, or None.
    """

    def __init__(self, signals: Sequence[signal.Signals], grace: float) -> None:
        self._signals = signals
        self._grace = grace
        self._before: dict[signal.Signals, Any] = {}
        self._timer: threading.Timer | None = None
        self.is_entered = False
        self.received: signal.Signals | None = None

    def __enter__(self) -> StopSignals:
        self.is_entered = True
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self.received is not None and error is not None:
            failure.mark_seen_by_launcher(error)
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}
        self.is_entered = False
        if self._timer is not None:
            self._timer.cancel()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        if self.received == signal.SIGHUP:
            leave_terminal()
        for handled in self._before:  # the default action also ends code that does not return to Python
            signal.signal(handled, signal.SIG_DFL)
        self._timer = threading.Timer(self._grace, self._end)
        self._timer.daemon = True
        self._timer.start()

    def _end(self) -> None:
        assert self.received is not None
        os.write(2, f"mirrored: no step was done {self._grace:g} s after {self.received.name}; ending\n".encode())
        os.kill(os.getpid(), self.received)
