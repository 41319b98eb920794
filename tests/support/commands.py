"""``mirrored`` and ``torchrun`` without waiting for Python to load torch: their process is forked from one that has.

So are the towers that they start (:mod:`tests.support.forked_programs`), and scripts in place of ``python script.py``.
For the many tests that are about what a job does once it runs; what a user types is run by :mod:`tests.support.jobs`.
Loading torch takes 1.3 s of CPU in each.
"""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, NoReturn

from tests.support.forked_programs import exec_python, fork_towers
from tests.support.jobs import check_code, variables_with
from tests.support.patience import make_agent_patient
from tests.support.waiting import HANG


class Command:
    """A command that runs, with the part of :class:`subprocess.Popen`'s interface that tests use.

    Args:
        run: what the process runs, with ``args``; returns the exit code or raises SystemExit.
        env: changes of the environment.
        cwd: the directory it runs in; default: the tests' own.
        enter: is called in the process, before all else.
    """

    def __init__(
        self,
        run: Callable[..., int | None],
        *args: Any,
        env: dict[str, str] | None = None,
        cwd: str | None = None,
        enter: Callable[[], None] | None = None,
    ) -> None:
        context = get_context("forkserver")
        receiver, sender = context.Pipe(duplex=False)
        self._folder = tempfile.TemporaryDirectory()
        self._errors = pathlib.Path(self._folder.name, "errors")
        arguments = (sender, str(self._errors), variables_with(env), cwd or os.getcwd(), enter, run, args)
        self._process = context.Process(target=_be_command, args=arguments)
        self._process.start()
        sender.close()
        self.pid = self._process.pid
        self.stdout = os.fdopen(os.dup(receiver.fileno()))
        receiver.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float = HANG) -> tuple[str, str]:
        """What it prints until it and all that hold its standard output have ended."""
        if not self.stdout.closed:
            guard = threading.Timer(timeout, self.kill)
            guard.start()
            with self.stdout:
                self._output = self.stdout.read()
            self._process.join()
            self._in_time = guard.is_alive()
            guard.cancel()
        errors = self._errors.read_text()
        assert self._in_time, f"it did not end within {timeout} s: {self._output}{errors}"
        return self._output, errors


def _be_command(
    sender: Connection,
    errors: str,
    variables: dict[str, str],
    directory: str,
    enter: Callable[[], None] | None,
    run: Callable[..., int | None],
    args: tuple[Any, ...],
) -> None:
    os.dup2(sender.fileno(), 1)
    sender.close()
    target = os.open(errors, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(target, 2)
    os.close(target)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(variables)
    tempfile.tempdir = None  # where the process was forked from, the variables were others
    if enter is not None:
        enter()
    sys.exit(run(*args))


def start_command(
    words: Sequence[str], *, env: dict[str, str] | None = None, enter: Callable[[], None] | None = None
) -> Command:
    """Start ``mirrored …`` or ``torchrun …``."""
    return Command(command_line, *words, env=env, enter=enter)


def command_line(name: str, *words: str) -> int | None:
    """``mirrored …`` or ``torchrun …``, in this process; returns the exit code."""
    fork_towers()
    os.execv = _exec
    if name == "mirrored":
        from mirrored import cli

        make_agent_patient()
        return cli.main(words)
    assert name == "torchrun"
    from torch.distributed import run

    sys.argv = [name, *words]
    run.main(words)
    return 0


def _exec(_path: str, command: Sequence[str]) -> NoReturn:
    """Replaces ``os.execv`` of a new Python: runs its agent or its script in this process."""
    from towers.launching import agent, job

    _, program, *arguments = command
    if program == job.agent_command(job.Job(1), [])[1]:
        agent.main(arguments)
    exec_python(command, dict(os.environ))


def start_script(
    words: Sequence[str],
    *,
    env: dict[str, str] | None = None,
    cwd: str | None = None,
    enter: Callable[[], None] | None = None,
) -> Command:
    """Start ``python …``.

    Args:
        words: a script and its arguments, or ``-m`` and a module with its own.
        enter: see :class:`Command`.
    """
    return Command(_python, words, env=env, cwd=cwd, enter=enter)


def _python(words: Sequence[str]) -> NoReturn:
    fork_towers()
    os.execv = _exec
    _exec(sys.executable, [sys.executable, *words])


def run_script(
    words: Sequence[str],
    *,
    env: dict[str, str] | None = None,
    cwd: str | None = None,
    enter: Callable[[], None] | None = None,
    code: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run ``python …`` to its end."""
    return _to_its_end(start_script(words, env=env, cwd=cwd, enter=enter), words, HANG, code)


def run_command(
    words: Sequence[str],
    *,
    env: dict[str, str] | None = None,
    cwd: str | None = None,
    enter: Callable[[], None] | None = None,
    timeout: float = HANG,
    code: int | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run ``mirrored …`` or ``torchrun …`` to its end, as :func:`tests.support.jobs.run_program` does."""
    return _to_its_end(Command(command_line, *words, env=env, cwd=cwd, enter=enter), words, timeout, code)


def _to_its_end(
    command: Command, words: Sequence[str], timeout: float, code: int | None
) -> subprocess.CompletedProcess[str]:
    output, errors = command.communicate(timeout)
    return check_code(subprocess.CompletedProcess(words, command.returncode, output, errors), code)
