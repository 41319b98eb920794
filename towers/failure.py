"""How a tower that fails tells why, so that its exception is the last thing a person reads.

A tower that ends with an uncaught exception leaves a report in the file that torchrun's agent names
(``TORCHELASTIC_ERROR_FILE``), in the form torchrun itself reads. Our own agent prints the first of the
reports; under the user's own torchrun the report gives torchrun's summary its traceback.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
import time
import traceback
from types import TracebackType
from typing import Any, NoReturn

from towers import topology
from towers.errors import PeerLostError

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

_SHORT = 200  # characters

_PEER_LOST = ("Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe")

_LAUNCHER_SECONDS = 2.0

EXIT_PREEMPTED = 75
"""Exit code of a tower that was told to end and has saved, so that it can be continued, and of a job of such towers.

All towers end with it together. (``EX_TEMPFAIL`` of sysexits.h: try again later.)
"""


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


def report(error: BaseException, trace: str = "") -> dict[str, object]:
    """The report of an exception, in torchrun's form with a finer clock and whether it is a consequence.

    Args:
        trace: comes before an exception that was raised nowhere.
    """
    lines = [trace, *traceback.format_exception(type(error), error, error.__traceback__)]
    return {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {
                "py_callstack": "".join(lines),
                "timestamp": str(int(time.time())),
                "time": time.time(),
                "consequence": is_peer_lost(error),
                "short": in_short(f"{type(error).__name__}: {error}"),
            },
        }
    }


def leave_report(error: Exception, trace: str) -> None:
    """Leave a report of an exception that was raised nowhere, before this process ends at once.

    Args:
        trace: where the process was.
    """
    _give_way(error)
    if path := os.environ.get(ERROR_FILE):
        with open(path, "w") as file:
            json.dump(report(error, trace), file)
    if topology.WHEREABOUTS not in os.environ:  # nobody of ours prints it
        print(f"{trace}{type(error).__name__}: {error}", file=sys.stderr, flush=True)


def _give_way(error: BaseException) -> None:
    """Let the launcher, which is about to end this process, first see whose failure was the cause."""
    if is_peer_lost(error):
        time.sleep(_LAUNCHER_SECONDS)


def leave(code: int) -> NoReturn:
    """End this process at once, without taking the interpreter down."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or nobody reads it any more
            stream.flush()
    os._exit(code)


def details(data: object) -> dict[str, Any]:
    """What :func:`report` says, from what was read; empty when there is nothing of the kind."""
    message = data.get("message") if isinstance(data, dict) else None
    found = message.get("extraInfo") if isinstance(message, dict) else None
    return found if isinstance(found, dict) else {}


def in_short(error: str) -> str:
    """An error as part of a sentence: its first line, and of a long one the first sentence."""
    first = error.strip().partition("\n")[0]
    if len(first) > _SHORT:
        first = first.partition(". ")[0]
    return first if len(first) <= 2 * _SHORT else f"{first[: 2 * _SHORT]}…"


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
            _give_way(error)
            with open(path, "w") as file:
                json.dump(report(error), file)
            if quiet:
                return
        if quiet and issubclass(kind, KeyboardInterrupt) and os.environ.get("LOCAL_RANK") != "0":
            return
        previous(kind, error, trace)

    sys.excepthook = hook
