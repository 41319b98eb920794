"""How a tower that fails ends: its report, which is the last message that the user reads, and the end of its process.

A tower that ends with an uncaught exception leaves a report in the file that its agent names
(``TORCHELASTIC_ERROR_FILE``), in the form that torchrun reads. ``mirrored``'s own agent prints the first of the
reports. Under the user's own torchrun, the report adds the traceback to torchrun's summary.

[Note: a tower that has failed ends itself] Its interpreter may wait forever for a thread, a pool or an exit handler,
and torchrun only checks exit codes. So faulthandler's watchdog, a thread that needs no interpreter, ends the process
with exit code 1:

- After its report (or its traceback, if the tower prints that itself), its threads have 1.5 s.
- After they have ended, exit handlers and the interpreter, whose end takes a second of a core with torch, have until
  2.5 s.
- While a checkpoint is written, its threads have 30 s more. A flag in the tower's status record informs its agent.

A tower that has saved on request and is about to end does not wait longer for such threads, either: the others and the
scheduler wait for its end.

[Note: caught errors] A script may catch the error that put its towers out of step (``except RuntimeError: continue``,
to skip a batch), and end as if all was well. At the next collective outside exception handlers, and otherwise at its
end, the tower therefore leaves a report of that error, and ends with exit code 1. Under Ray Train, the end of the
process is too late: a function that returns has succeeded. In ``mirrored.launch``, the caller gets the result of a
function that returns.

[Note: one report] Several threads may find the same failure: the script's, in a collective that raises, and those that
watch NCCL and the deadline of a step. If the script's error comes first (Python sets ``sys.last_value`` before it calls
a hook), it is the report, and the other threads wait for the end of the process. torch's excepthook replaces
``sys.stderr`` by a buffer while it calls the hook that it has replaced, so the other threads print to
``sys.__stderr__``. On an H200, such a thread printed its report into that buffer, and ended the process before torch
printed it.

[Note: consequences] The report of a tower that fails because another one is gone is marked, so that launchers of
``mirrored`` name the other one. Errors of c10d and of its Gloo mean that another tower is gone. Errors of a script's
own connections, to a database or an object store, are causes.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import faulthandler
import functools
import gc
import io
import json
import math
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import re
import signal
import stat
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import NamedTuple, NoReturn, TextIO

import torch
from torch.distributed import DistError

from towers.errors import PeerLostError, TowersError
from towers.system.messages import get_logger
from towers.system.timeouts import Deadline, clock, wait_until
from towers.topology import AGENT, ERROR_FILE, RUN_ID, STARTED_BY, STATUS_RECORD

_SHORT = 200  # characters

_PEER_LOST = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "nccl error: remote process exited",
    "nccl communicator was aborted",
)

TOO_LARGE = (
    "mirrored: if the model is too large for each tower, shard the optimizer (shard_optimizer=True) or the model "
    "(strategy.shard): see docs/advanced/fully-sharded.md"
)
"""The note on errors that report too little memory."""

_LAST_SECONDS = 1.5  # time for threads of a process that has failed
_EXIT_SECONDS = 2.5  # the same, with exit handlers and the interpreter's end (with torch, a second of a core)
_SAVED_EXIT_SECONDS = 5.0  # time for exit handlers and child processes of a tower that has saved

SAVING_SECONDS = 30.0
"""The time that a checkpoint which is being written may still take after the job has failed."""

EXIT_PREEMPTED = 75
"""Exit code of a tower that has saved and ended on request and can be continued, and of a job of such towers.

All towers end with it together. (``EX_TEMPFAIL`` of sysexits.h: try again later.)
"""

log = get_logger("towers")


def is_peer_lost(error: BaseException) -> bool:
    """Returns whether ``error`` only reports that another tower is gone; see [Note: consequences]."""
    if isinstance(error, PeerLostError):
        return True
    text = _text_of(error).lower()
    of_c10d = isinstance(error, DistError) or (type(error) is RuntimeError and "gloo/transport" in text)
    return of_c10d and any(phrase in text for phrase in _PEER_LOST)


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether ``error`` reports that a device or the host has not enough memory."""
    of_cpu = type(error) is RuntimeError and "DefaultCPUAllocator: can't allocate memory" in _text_of(error)
    return of_cpu or isinstance(error, (MemoryError, torch.OutOfMemoryError))


def signal_name(number: int) -> str:
    """Returns ``"SIGKILL"`` for 9, and a number for a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# -- reports -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class FailureReport:
    """Why a tower has failed. A report that was read is untrusted: any process may have written its file.

    Attributes:
        text: the exception's type and message.
        trace: its traceback.
        time: the time of the exception, in seconds since 1970 on the tower's clock.
        consequence: whether the tower failed only because another one was gone.
    """

    text: str
    trace: str
    time: float
    consequence: bool

    @classmethod
    def of(cls, error: BaseException, trace: str = "") -> FailureReport:
        """Returns the report of an exception.

        Args:
            trace: a stack to print before an exception that was raised nowhere.
        """
        text = f"{type(error).__name__}: {_text_of(error)}"
        if is_out_of_memory(error) and TOO_LARGE not in getattr(error, "__notes__", ()):
            error.add_note(TOO_LARGE)
        try:
            lines = traceback.format_exception(type(error), error, error.__traceback__)
        except Exception:  # foreign exceptions may raise anything here
            lines = [*traceback.format_tb(error.__traceback__), f"{text}\n"]
        return cls(text, "".join([trace, *lines]), clock.wall_time(), is_peer_lost(error))

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> FailureReport | None:
        """Returns the report in this file, or None if the file does not exist or contains no report."""
        try:
            with open(path) as file:
                message = json.load(file)["message"]
            extra = message["extraInfo"]
            when = float(extra.get("time") or extra["timestamp"])
            if not math.isfinite(when):
                return None
            return cls(str(message["message"]), str(extra["py_callstack"]), when, extra.get("consequence") is True)
        except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError, OverflowError):
            return None

    def write(self, path: str) -> bool:
        """Writes the report atomically, in torchrun's form with a finer clock, and returns whether it was written."""
        extra = {
            "py_callstack": self.trace,
            "timestamp": str(int(clock.wall_time())),
            "time": self.time,
            "consequence": self.consequence,
        }
        unfinished = f"{path}.{os.getpid()}"
        try:
            with open(unfinished, "w") as file:
                json.dump({"message": {"message": self.text, "extraInfo": extra}}, file)
            os.replace(unfinished, path)
        except OSError:  # a full disk, a directory that is gone
            with contextlib.suppress(OSError):
                os.unlink(unfinished)
            return False
        log.debug("failure reported in %s: %s", path, self.short)
        return True

    @property
    def short(self) -> str:
        """The exception as part of a sentence: its first line, or the first sentence of a long line."""
        lines = self.text.strip().split("\n")
        first = lines[0]
        if re.search(r"Caught \w+ in DataLoader worker process \d+\.$", first):  # its traceback follows
            first = f"{lines[-1]} (in worker process {first.split()[-1].rstrip('.')} of a DataLoader)"
        if len(first) > _SHORT:
            first = first.partition(". ")[0]
        return first if len(first) <= 2 * _SHORT else f"{first[: 2 * _SHORT]}…"


def _text_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as broken:  # raised by a foreign exception
        return f"(its text cannot be had: {type(broken).__name__})"


def report_path(directory: str | os.PathLike[str], tower: int) -> pathlib.Path:
    """Returns the file of ``tower``'s report, in the directory of the process that starts it."""
    return pathlib.Path(directory) / f"error{tower}.json"


def leave_report(error: Exception, trace: str) -> None:
    """Leaves a report of an exception that was raised nowhere, before this process ends at once.

    See [Note: one report].

    Args:
        trace: the stack of this process.
    """
    if not _report(error, os.environ.get(ERROR_FILE), trace) or STATUS_RECORD not in os.environ:
        # No launcher of mirrored prints it.
        stream = sys.stderr if _in_main_thread() else sys.__stderr__ or sys.stderr
        print(f"{trace}{type(error).__name__}: {error}", file=stream, flush=True)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _report(error: BaseException, path: str | None, trace: str = "") -> bool:
    """Leaves a report in ``path``, if that is not None, and returns whether it was written.

    See [Note: one report].
    """
    report = FailureReport.of(error, trace)
    if isinstance(getattr(sys, "last_value", None), Exception) and not _in_main_thread():
        clock.sleep(_LAST_SECONDS + SAVING_SECONDS)  # until this process ends
    return path is not None and report.write(path)


# -- the end of a process ------------------------------------------------------------------------------------


@functools.cache
def install_hooks() -> None:
    """Makes uncaught exceptions leave a report and end this process from now on. The end of its agent ends it, too.

    Under ``mirrored``'s own agent, this process does not print the traceback, because the agent prints it in full,
    last. Only the machine's first tower reports an interruption (Ctrl-C reaches all towers).
    """
    quiet = RUN_ID in os.environ and STARTED_BY in os.environ
    path = os.environ.get(ERROR_FILE)
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        failed = issubclass(kind, Exception)
        others_tell = issubclass(kind, KeyboardInterrupt) and os.environ.get("LOCAL_RANK") != "0"
        reported = (failed and _report(error, path)) or others_tell
        if failed:  # even if no process reads the output
            end_in(SAVING_SECONDS)
        try:
            if not (quiet and reported):
                previous(kind, error, trace)
        finally:  # not before, because printing may take longer than the remaining time
            if failed:
                end_soon()

    sys.excepthook = hook
    atexit.register(leave_if_out_of_step)
    if RUN_ID in os.environ:
        end_with_parent()


class _OutOfStep(NamedTuple):
    """The process and the thread that are out of step, the error at the end, and the stack of the first error."""

    process: int
    thread: int
    error: Exception
    trace: str


_out_of_step: _OutOfStep | None = None


def note_out_of_step(tower: int, cause: BaseException) -> None:
    """Makes this process end with a failure, whatever its script catches; see [Note: caught errors].

    Args:
        tower: this process's.
        cause: the error that put the towers out of step. An interruption is none.
    """
    global _out_of_step
    if _out_of_step is None and isinstance(cause, Exception):
        report = FailureReport.of(cause)
        # The script may catch the error before it has gone through the script's own frames.
        lines = [*traceback.format_stack()[:-2], *traceback.format_tb(cause.__traceback__)]
        trace = "".join(["Traceback (most recent call last):\n", *lines, f"{report.text}\n"])
        text = f"the script of tower {tower} has caught an error that put the towers out of step ({report.short})"
        kind = PeerLostError if report.consequence else TowersError
        _out_of_step = _OutOfStep(os.getpid(), threading.get_ident(), kind(text), trace)


def leave_if_out_of_step() -> None:
    """Ends this process at its end with a report, if its towers are out of step and no error has ended the script."""
    if _out_of_step is None or getattr(sys, "last_value", None) is not None:
        return
    if os.getpid() == _out_of_step.process and os.environ.get(STARTED_BY) != "launch":
        _leave_out_of_step(_out_of_step)


def _leave_out_of_step(noted: _OutOfStep) -> NoReturn:
    flush_output()
    leave_report(noted.error, noted.trace)
    leave(1)


def leave_if_caught() -> None:
    """Ends this process with a report before a collective, if its script has caught the error and continues."""
    noted, here = _out_of_step, (os.getpid(), threading.get_ident())
    if noted is not None and here == (noted.process, noted.thread) and sys.exc_info()[1] is None:
        _leave_out_of_step(noted)


@functools.cache
def end_with_parent() -> None:
    """Kills this process as soon as the process that started it has ended, for any reason: the parent watchdog.

    Towers of torchrun's agent have their own sessions, and towers of the fork server are its children, not the
    caller's. No signal reaches them when the process that started them is killed. A thread therefore watches that
    process.
    """
    parent = multiprocessing.parent_process()
    # Not the current parent: the agent may already be gone.
    agent = int(os.environ.get(AGENT) or os.getppid())

    def watch() -> None:
        if parent is not None:
            multiprocessing.connection.wait([parent.sentinel])
        else:
            while os.getppid() == agent:
                clock.sleep(0.5)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="towers-parent-watchdog", daemon=True).start()


_saves: list[Callable[[bool], None]] = []  # one per checkpoint that this process is writing
_saves_lock = threading.Lock()


@contextlib.contextmanager
def saving(tell: Callable[[bool], None]) -> Iterator[None]:
    """Marks that a checkpoint is being written inside. A process that fails then takes :data:`SAVING_SECONDS` for it.

    Args:
        tell: is called with whether this process is writing any checkpoint.
    """
    with _saves_lock:
        _saves.append(tell)
        tell(True)
    try:
        yield
    finally:
        with _saves_lock:
            _saves.remove(tell)
            tell(bool(_saves))


def end_in(seconds: float) -> None:
    """Ends this process with exit code 1 after ``seconds``, whatever its threads and handlers do."""
    faulthandler.dump_traceback_later(seconds, exit=True, file=_nowhere())


@functools.cache
def _nowhere() -> TextIO:
    return open(os.devnull, "w")


def end_soon() -> None:
    """Ends this process, which has failed, with exit code 1 within seconds.

    See [Note: a tower that has failed ends itself].
    """
    deadline = Deadline(_EXIT_SECONDS)

    def when_threads_have_ended() -> None:
        if not _saves:
            end_in(max(deadline.remaining(), _EXIT_SECONDS - _LAST_SECONDS))

    atexit.register(when_threads_have_ended)
    if not _saves:
        end_in(_LAST_SECONDS)
        return
    end_in(SAVING_SECONDS + _LAST_SECONDS)

    def watch() -> None:
        while _saves:
            clock.sleep(0.05)
        end_in(_LAST_SECONDS)

    threading.Thread(target=watch, name="towers-end", daemon=True).start()


def end_soon_preempted() -> None:
    """Makes this process, which has saved and is about to end by itself, end with :data:`EXIT_PREEMPTED`.

    Its threads have 1.5 s from the end of the script, or from the end of a checkpoint that one of them is writing. Then
    its exit handlers have 5 s; these may send a tracker's last lines or wait for child processes.
    """
    script_ended, threads_ended = threading.Event(), threading.Event()

    def watch() -> None:
        script_ended.wait()
        wait_until(lambda: not _saves, SAVING_SECONDS)
        if threads_ended.wait(_LAST_SECONDS):
            clock.sleep(_SAVED_EXIT_SECONDS)  # this thread ends with the interpreter
        leave(EXIT_PREEMPTED)

    threading.Thread(target=watch, name="towers-end", daemon=True).start()
    threading._register_atexit(script_ended.set)  # type: ignore[attr-defined]  # before threads and pools are waited for
    atexit.register(threads_ended.set)


def skip_inherited_finalizers() -> None:
    """Keeps this forked process from running the finalizers (``weakref.finalize``) that its parent has registered.

    torch registers 137 finalizers, one for each library of operators. They unregister the operators at the end of a
    process, which takes 0.06 s and copies 28 MB of pages that a fork shares with its parent.
    """
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False


def run_exit_handlers() -> None:
    """Waits for threads and runs the exit handlers, each once, as Python does at the end of a program."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()


def leave(code: int) -> NoReturn:
    """Ends this process, without finalizing the interpreter, as soon as it has flushed its output and its files."""
    end_in(_SAVED_EXIT_SECONDS)  # a disk or the reader of a pipe may hang
    flush_output()
    flush_files()
    os._exit(code)


def flush_output() -> None:
    """Flushes everything that this process has printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):  # there is no stream, or no reader any more
            stream.flush()


def flush_files() -> None:
    """Flushes the regular files that the script has not closed, as Python does when it finalizes the interpreter.

    It leaves out files that were opened before the last :func:`gc.freeze`. In a fork, these belong to the parent.
    """
    for file in gc.get_objects():
        if issubclass(type(file), (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)):
            with contextlib.suppress(Exception):  # the file is closed, or a subclass raises an error of its own
                if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    file.flush()
