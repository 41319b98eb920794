"""Being asked to stop: by SIGTERM, SIGINT or SIGHUP on any tower, at the same step on all of them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

from towers import failure
from towers.collectives.communicator import Communicator, Pending
from towers.console import leave_terminal


class StopSignals:
    """Notes the first of the signals; the second ends the process as it always would, and so does the end of the grace.

    Signals that whoever started the program had ignored stay so. Only the main thread can be asked to stop.

    Args:
        signals: which.
        grace: seconds between the first signal and the end, if nothing else ends the program before.
    """

    def __init__(self, signals: Sequence[signal.Signals], grace: float) -> None:
        self._signals = signals
        self._grace = grace
        self._before: dict[signal.Signals, Any] = {}
        self._timer: threading.Timer | None = None
        self.received: signal.Signals | None = None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self.received is not None and error is not None:
            failure.note_told(error)
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}
        if self._timer is not None:
            self._timer.cancel()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        if self.received == signal.SIGHUP:
            leave_terminal()
        for handled in self._before:  # the system's own way: it also ends what does not come back to Python
            signal.signal(handled, signal.SIG_DFL)
        self._timer = threading.Timer(self._grace, self._end)
        self._timer.daemon = True
        self._timer.start()

    def _end(self) -> None:
        assert self.received is not None
        os.write(2, f"mirrored: no step was done {self._grace:g} s after {self.received.name}; ending\n".encode())
        os.kill(os.getpid(), self.received)


STOP, DUE = 1, 2


class Flags:
    """What any tower wants, known to all of them at the same step without waiting: one step later.

    Flags are exchanged while the next step runs.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._under_way: tuple[Pending, torch.Tensor] | None = None

    def exchange(self, mine: int) -> int:
        """Tell all towers ``mine``; returns what they told the last time, all together (with one tower: this time)."""
        if self._comm.size == 1:
            return mine
        told = 0
        if self._under_way is not None:
            pending, rows = self._under_way
            pending.wait()
            for flags in rows.view(-1).tolist():
                told |= flags
        self._under_way = self._comm.start_all_gather(torch.tensor([mine], dtype=torch.uint8, device="cpu"))
        return told
