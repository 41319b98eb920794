"""How a tower that fails tells why, so that its exception is the last thing a person reads.

A tower that ends with an uncaught exception leaves a report in the file that torchrun's agent names
(``TORCHELASTIC_ERROR_FILE``), in the form torchrun itself reads. Our own agent prints the first of the
reports; under the user's own torchrun the report gives torchrun's summary its traceback.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import faulthandler
import functools
import json
import math
import os
import pathlib
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NoReturn

from towers import topology
from towers.errors import PeerLostError

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"

_SHORT = 200  # characters

_PEER_LOST = ("Connection closed by peer", "Connection reset by peer", "Connection refused", "Broken pipe")

_LAUNCHER_SECONDS = 2.0
_LAST_SECONDS = 1.5  # what threads of a process that has failed may take
_EXIT_SECONDS = 2.5  # the same with exit handlers and the interpreter, whose end takes a second of a core with torch

SAVING_SECONDS = 30.0
"""How long a checkpoint that is being written may still take when the job has failed."""

EXIT_PREEMPTED = 75
"""Exit code of a tower that was told to end and has saved, so that it can be continued, and of a job of such towers.

All towers end with it together. (``EX_TEMPFAIL`` of sysexits.h: try again later.)
"""


def is_peer_lost(error: BaseException) -> bool:
    """Whether ``error`` only says that another tower went away: a consequence, not a cause."""
    if isinstance(error, PeerLostError):
        return True
    return isinstance(error, (RuntimeError, OSError)) and any(text in _said_by(error) for text in _PEER_LOST)


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
    text = f"{type(error).__name__}: {_said_by(error)}"
    try:
        lines = traceback.format_exception(type(error), error, error.__traceback__)
    except Exception:  # whatever a stranger's exception does
        lines = [*traceback.format_tb(error.__traceback__), f"{text}\n"]
    return {
        "message": {
            "message": text,
            "extraInfo": {
                "py_callstack": "".join([trace, *lines]),
                "timestamp": str(int(time.time())),
                "time": time.time(),
                "consequence": is_peer_lost(error),
                "short": in_short(text),
            },
        }
    }


def _said_by(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # a stranger's
        return f"(its text cannot be had: {type(broken).__name__})"


def _write_report(path: str, found: dict[str, object]) -> bool:
    """Write a report whole, or not at all; whether it was written."""
    unfinished = f"{path}.{os.getpid()}"
    try:
        with open(unfinished, "w") as file:
            json.dump(found, file)
        os.replace(unfinished, path)
    except OSError:  # a full disk, a directory that is gone
        with contextlib.suppress(OSError):
            os.unlink(unfinished)
        return False
    return True


def leave_report(error: Exception, trace: str) -> None:
    """Leave a report of an exception that was raised nowhere, before this process ends at once.

    Args:
        trace: where the process was.
    """
    _give_way(error)
    path = os.environ.get(ERROR_FILE)
    written = path is not None and _write_report(path, report(error, trace))
    if not written or topology.WHEREABOUTS not in os.environ:  # nobody of ours prints it
        print(f"{trace}{type(error).__name__}: {error}", file=sys.stderr, flush=True)


def note_told(error: BaseException) -> None:
    """Note of an exception that the launcher has told this process to end: it has seen whose failure was the cause."""
    with contextlib.suppress(Exception):  # a stranger's, which takes no attributes
        error.launcher_has_seen = True  # type: ignore[attr-defined]


def _give_way(error: BaseException) -> None:
    """Let the launcher, which is about to end this process, first see whose failure was the cause."""
    if is_peer_lost(error) and not getattr(error, "launcher_has_seen", False):
        time.sleep(_LAUNCHER_SECONDS)


class _Saves:
    """Checkpoints that this process is writing."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0

    def add(self, number: int, tell: Callable[[bool], None]) -> None:
        with self._lock:
            self.count += number
            tell(self.count > 0)


_saves = _Saves()


@contextlib.contextmanager
def saving(tell: Callable[[bool], None]) -> Iterator[None]:
    """While a checkpoint is being written: a process that fails meanwhile takes :data:`SAVING_SECONDS` for it.

    Args:
        tell: tells others whether this process is writing any.
    """
    _saves.add(1, tell)
    try:
        yield
    finally:
        _saves.add(-1, tell)


def end_soon() -> None:
    """See that this process, which has failed, ends with exit code 1, whatever its threads and exit handlers wait for.

    The end is left to faulthandler's own thread, which needs no interpreter.
    """
    nowhere = open(os.devnull, "w")  # noqa: SIM115 it is used at the end
    started = time.monotonic()

    def end_in(seconds: float) -> None:
        faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)

    def when_threads_have_ended() -> None:
        if not _saves.count:
            end_in(max(_EXIT_SECONDS - (time.monotonic() - started), _EXIT_SECONDS - _LAST_SECONDS))

    atexit.register(when_threads_have_ended)
    if not _saves.count:
        end_in(_LAST_SECONDS)
        return
    end_in(SAVING_SECONDS + _LAST_SECONDS)

    def watch() -> None:
        while _saves.count:
            time.sleep(0.05)
        end_in(_LAST_SECONDS)

    threading.Thread(target=watch, name="towers-end", daemon=True).start()


def leave(code: int) -> NoReturn:
    """End this process at once, without taking the interpreter down."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there is none, or nobody reads it any more
            stream.flush()
    os._exit(code)


@dataclasses.dataclass(frozen=True)
class Told:
    """What a tower's report says, which is foreign data: whoever finds the file may have written it.

    Attributes:
        short: the exception, as part of a sentence.
        trace: its traceback.
        time: when it came, in seconds since 1970 by the tower's clock.
        consequence: whether the tower failed only because another one was gone.
    """

    short: str
    trace: str
    time: float
    consequence: bool


def report_in(directory: str | os.PathLike[str], tower: int) -> pathlib.Path:
    """Where the report of ``tower`` lies in its starter's directory."""
    return pathlib.Path(directory) / f"error{tower}.json"


def read_report(path: str | os.PathLike[str]) -> Told | None:
    """The report in this file; None where there is none, or something else."""
    try:
        with open(path) as file:
            return told_by(json.load(file))
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError):
        return None


def told_by(report: Any) -> Told:
    """What a report says.

    Raises:
        ValueError, TypeError, LookupError, AttributeError, OverflowError: it is none.
    """
    message = report["message"]
    found = message["extraInfo"]
    when = float(found.get("time") or found["timestamp"])
    if not math.isfinite(when):
        raise ValueError(f"{when} is no time")
    short = str(found.get("short") or in_short(str(message["message"])))
    return Told(short, str(found["py_callstack"]), when, found.get("consequence") is True)


def in_short(error: str) -> str:
    """An error as part of a sentence: its first line, and of a long one the first sentence."""
    first = error.strip().partition("\n")[0]
    if len(first) > _SHORT:
        first = first.partition(". ")[0]
    return first if len(first) <= 2 * _SHORT else f"{first[: 2 * _SHORT]}…"


@functools.cache
def leave_report_on_failure(*, quiet: bool) -> None:
    """From now on, an uncaught exception leaves its report for the agent, if there is one, and ends this process.

    Args:
        quiet: do not print the traceback as well (our own agent prints it, whole and last), and let only the
            machine's first tower tell of an interruption (Ctrl-C reaches all of them).
    """
    path = os.environ.get(ERROR_FILE)
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, Exception):
            _give_way(error)
            written = path is not None and _write_report(path, report(error))
            end_soon()
            if written and quiet:
                return
        if quiet and issubclass(kind, KeyboardInterrupt) and os.environ.get("LOCAL_RANK") != "0":
            return
        previous(kind, error, trace)

    sys.excepthook = hook
