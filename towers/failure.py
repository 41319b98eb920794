"""How a tower that fails tells why, so that its exception is the last thing a person reads.

A tower that ends with an uncaught exception leaves a report in the file that torchrun's agent names
(``TORCHELASTIC_ERROR_FILE``), in the form torchrun itself reads. Our own agent prints the first of the
reports; under the user's own torchrun the report gives torchrun's summary its traceback.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
import traceback
from types import TracebackType

from towers.errors import PeerLostError

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

EXIT_PREEMPTED = 75
"""Exit code of a program that was asked to stop, and is saved: EX_TEMPFAIL of sysexits.h, try again later."""

_PEER_LOST = ("Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe")

_LAUNCHER_SECONDS = 2.0


def is_peer_lost(error: BaseException) -> bool:
    """Whether ``error`` only says that another tower went away: a consequence, not a cause."""
    if isinstance(error, PeerLostError):
        return True
    return isinstance(error, (RuntimeError, OSError)) and any(text in str(error) for text in _PEER_LOST)


def signal_name(number: int) -> str:
    """``"SIGKILL"`` for 9; signals without a name are told by number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def report(error: BaseException) -> dict[str, object]:
    """The report of an exception, in torchrun's form with a finer clock and whether it is a consequence."""
    lines = traceback.format_exception(type(error), error, error.__traceback__)
    return {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {
                "py_callstack": "".join(lines),
                "timestamp": str(int(time.time())),
                "time": time.time(),
                "consequence": is_peer_lost(error),
            },
        }
    }


@functools.cache
def leave_report_on_failure(*, quiet: bool) -> None:
    """From now on, an uncaught exception of this process leaves its report for the agent.

    Args:
        quiet: do not print the traceback as well (our own agent prints it, whole and last), and let only the
            machine's first tower tell of an interruption (Ctrl-C reaches all of them).
    """
    path = os.environ.get(ERROR_FILE)
    if not path:
        return
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, Exception):
            if is_peer_lost(error):
                # The launcher is about to see who failed first, and to end this process.
                time.sleep(_LAUNCHER_SECONDS)
            with open(path, "w") as file:
                json.dump(report(error), file)
            if quiet:
                return
        if quiet and issubclass(kind, KeyboardInterrupt) and os.environ.get("LOCAL_RANK") != "0":
            return
        previous(kind, error, trace)

    sys.excepthook = hook
