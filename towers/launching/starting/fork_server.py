"""Starts the agent's towers as forks of a process that has loaded torch.

[Note: a fork in place of a new Python] A new Python needs 1.3 s of a core to load torch, and another second to load
torch's compiler for its first optimizer, and its own 200 MB for them. A fork needs hundredths of a second, and shares
that memory. A script finds the same state as in a new Python: streams, variables, ``sys.argv``, ``sys.path``,
``__main__``, random states, exit handlers, and the same end by an exception or a signal. There are four differences:
``ps`` shows the agent's command for every tower; the hashes of strings are the same in all towers; variables that a
script itself sets are too late for settings that torch reads when it is loaded (``TORCH_LOGS``); and
finalizers (``weakref.finalize``) that the fork server has registered do not run at the end of a tower.

The fork server is forked from the agent before the agent has threads, and has no threads itself. Towers become children
of the agent (``PR_SET_CHILD_SUBREAPER``), which receives their exit codes as for other children. In some cases a fork
does not suffice, and the new process executes the command: for options of Python other than ``-u``; for a program that
is neither a file nor a module; if a module in the program's folder hides a loaded one; and for accelerators whose
modules do something when they are loaded.

[Note: no garbage while loading] Torch and its compiler create a million objects that stay. Repeated garbage collection
over them takes a quarter of the loading time. Therefore, the programs that become an agent disable garbage collection
until the fork server runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib.machinery
import json
import os
import pathlib
import runpy
import signal
import socket
import subprocess
import sys
import types
from collections.abc import Mapping, Sequence
from typing import IO, Any, NoReturn

import numpy
import torch

from towers.health.failure import leave, run_exit_handlers, skip_inherited_finalizers
from towers.system import machine
from towers.system.timeouts import clock, wait_until
from towers.system.torch_private import is_in_bad_fork, load_compiler, start_agents_processes_by

_FORKABLE = ("cuda", "xpu")  # accelerators whose modules do nothing until they are used

_START_SECONDS = 300.0  # time for the server to load torch's compiler and fork
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of <linux/prctl.h>


def fork_towers(path: Sequence[str]) -> None:
    """Lets torch's agent in this process, which has no threads yet, start its towers as forks, if forks are possible.

    From here on garbage is collected, see [Note: no garbage while loading].

    Args:
        path: ``sys.path`` of a new Python, without the entry for its program.
    """
    if sys.platform == "linux":
        start_agents_processes_by(ForkServer(path).start)
    gc.enable()


class ForkServer:
    """Starts Python programs as forks, see [Note: a fork in place of a new Python].

    Args:
        path: see :func:`fork_towers`.
    """

    def __init__(self, path: Sequence[str]) -> None:
        own, other = socket.socketpair()
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
        self._pid = os.fork()
        if self._pid == 0:
            own.close()
            _serve(other, path)
        other.close()
        own.settimeout(_START_SECONDS)
        self._stream = own.makefile("rw")

    def start(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str],
        stdout: IO[str] | None,
        stderr: IO[str] | None,
        start_new_session: bool,
    ) -> Process | subprocess.Popen[bytes]:
        """Starts a Python program, as ``subprocess.Popen`` does.

        Args:
            args: the command line, of this Python.
            env: the variables of its environment.
            stdout, stderr: the files that it writes to. None: those of this process.
            start_new_session: has no effect on a fork, which always has its own session.
        """
        streams = [None if stream is None else stream.name for stream in (stdout, stderr)]
        try:
            print(json.dumps([list(args), dict(env), streams]), file=self._stream, flush=True)
            return Process(int(self._stream.readline()))
        except (ValueError, OSError):  # the server was killed, or did not answer in time
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)  # otherwise, it would start the program a second time, later
            return subprocess.Popen(args, env=env, stdout=stdout, stderr=stderr, start_new_session=start_new_session)


class Process:
    """A child of this process, with the part of ``subprocess.Popen`` that torch's agent uses.

    Attributes:
        pid: its id.
        returncode: its exit code. Negative: the signal that ended it. None: it runs, or its state has not been read.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Returns its exit code, or None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Waits for its end, and returns its exit code.

        Raises:
            subprocess.TimeoutExpired: it has not ended within ``timeout`` seconds.
        """
        wait_until(lambda: self.poll() is not None, timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends it a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


def _serve(connection: socket.socket, path: Sequence[str]) -> NoReturn:
    """Runs the fork server until the agent has ended; in a fork, runs one of the programs."""
    os.setsid()  # the terminal's signals are for the agent
    load_compiler()
    gc.freeze()
    gc.enable()
    stream = connection.makefile("rw")
    while line := _readline(stream):
        args, variables, streams = json.loads(line)
        if fork_orphan():
            with contextlib.suppress(OSError):
                print(os.getpid(), file=stream, flush=True)
            stream.close()
            connection.close()
            _become(args, variables, streams, path)
    os._exit(0)


def fork_orphan() -> bool:
    """Forks a process that becomes a child of the nearest ancestor with ``PR_SET_CHILD_SUBREAPER``, or of init.

    Returns:
        Whether this is the new process, whose parent has changed.
    """
    if (child := os.fork()) > 0:
        os.waitpid(child, 0)
        return False
    child = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == child:
        clock.sleep(0.001)
    return True


def _readline(stream: IO[str]) -> str:
    """Returns the next line, or an empty string if the agent has ended."""
    try:
        return stream.readline()
    except OSError:
        return ""


def _become(
    args: list[str], variables: Mapping[str, str], streams: Sequence[str | None], path: Sequence[str]
) -> NoReturn:
    """Runs the program until it or the agent ends. No signal of a terminal reaches it."""
    os.setsid()
    machine.end_with_parent(signal.SIGKILL)
    for number, name in enumerate(streams, start=1):
        if name is not None:
            target = os.open(name, os.O_WRONLY | os.O_APPEND)
            os.dup2(target, number)
            os.close(target)
    os.environ.clear()
    os.environ.update(variables)
    become_program(args, path)


def become_program(args: list[str], path: Sequence[str]) -> NoReturn:
    """Runs a program in this fork, which has the program's environment and streams, until it ends.

    Args:
        args: the command line, of this Python.
        path: see :func:`fork_towers`.
    """
    skip_inherited_finalizers()
    words = args[1:]
    if unbuffered := words[:1] == ["-u"]:
        del words[0]
    if not _can_run(words):
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them; a new program should not
            signal.signal(number, signal.SIG_DFL)
        os.execve(args[0], args, os.environ)
    for stream in (sys.stdout, sys.stderr) if unbuffered else ():
        stream.reconfigure(write_through=True)  # type: ignore[union-attr]
    if (threads := os.environ.get("OMP_NUM_THREADS", "")).isdigit():
        torch.set_num_threads(int(threads))
    numpy.random.seed()
    torch.default_generator.seed()
    sys.orig_argv[:] = args
    sys.path[:] = path
    try:
        execute(words)
    except Exception:
        _end_failed()


def _end_failed() -> NoReturn:
    """Ends this process, whose program has failed, as Python does, but leaves freeing its memory to the system.

    The other towers wait for its end, and freeing all that torch has loaded takes a third of a second of a core.
    """
    run_exit_handlers()
    leave(1)


def _can_run(words: Sequence[str]) -> bool:
    """Returns whether a fork of this process can run the program that these words of a command line name."""
    is_module = words[0] == "-m"
    if not is_module and not (words[0].endswith(".py") and os.path.isfile(words[0])):
        return False
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is not None and (accelerator.type not in _FORKABLE or is_in_bad_fork(accelerator.type)):
        return False
    folder = pathlib.Path() if is_module else pathlib.Path(words[0]).parent
    return not any(_is_hidden(name, folder.resolve()) for name in sys.modules if "." not in name)


def _is_hidden(name: str, folder: pathlib.Path) -> bool:
    """Returns whether a module in the program's folder hides a loaded one of the same name from another place."""
    if name in sys.builtin_module_names or name == "__main__":
        return False
    if not (folder / name).exists() and not (folder / f"{name}.py").exists():
        return False
    origin = getattr(sys.modules[name].__spec__, "origin", None)
    return origin is None or (origin != "frozen" and not pathlib.Path(origin).resolve().is_relative_to(folder))


def execute(words: list[str]) -> NoReturn:
    """Runs a program in this process, as Python does with these words of its command line.

    Raises:
        BaseException: the program's. It has been printed, without the frames of this process's own program.
    """
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        if words[0] == "-m":
            sys.argv[:] = words[1:]
            sys.path.insert(0, os.getcwd())
            runpy._run_module_as_main(words[1])  # type: ignore[attr-defined]
        else:
            sys.argv[:] = words
            sys.path.insert(0, os.path.dirname(os.path.realpath(words[0])))
            file = os.path.abspath(words[0])
            loader = importlib.machinery.SourceFileLoader("__main__", file)
            vars(main).update(__file__=file, __cached__=None, __loader__=loader)
            exec(loader.source_to_code(loader.get_data(file), file), vars(main))
    except SystemExit:
        raise
    except BaseException as error:
        error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__  # as Python does
        sys.excepthook(type(error), error, error.__traceback__)
        sys.excepthook = _print_nothing
        raise
    raise SystemExit


def _print_nothing(*_: Any) -> None:
    """Replaces ``sys.excepthook`` after the exception has been printed."""
