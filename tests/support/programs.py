"""Programs that tests start as users do: each is a new process, whose output is read while it runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from tests.support.forks import SERVER, Fork
from tests.support.waiting import HANG

started: list[Program] = []
"""The programs of the test that runs, for the report of a test that hangs."""

Enter = Callable[[], object]

_SET_HERE = {
    *("PYTEST_CURRENT_TEST", "KERAS_BACKEND", "TF_FORCE_GPU_ALLOW_GROWTH"),
    *("TORCHINDUCTOR_CACHE_DIR", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"),  # by torch's compiler
    *("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"),  # by scikit-learn
}
"""Variables that packages set in the process of the tests."""


class Output:
    """The text that a program writes to a pipe. A thread reads it, so the pipe is never full.

    Attributes:
        so_far: everything that has arrived.
    """

    def __init__(self, pipe: IO[str]) -> None:
        self.so_far = ""
        self._read, self._ended = 0, False
        self._changed = threading.Condition()
        threading.Thread(target=self._collect, args=(pipe,), daemon=True).start()

    def _collect(self, pipe: IO[str]) -> None:
        with pipe:
            for line in pipe:
                self._add(line)
        self._add("", ended=True)

    def _add(self, line: str, *, ended: bool = False) -> None:
        with self._changed:
            self.so_far += line
            self._ended = ended
            self._changed.notify_all()

    def readline(self) -> str:
        """The next line; empty at the end."""
        with self._changed:
            is_there = self._changed.wait_for(lambda: self._ended or "\n" in self.so_far[self._read :], HANG)
            assert is_there, f"no line arrived within {HANG:.0f} s after {self.so_far!r}"
            end = self.so_far.find("\n", self._read) + 1 or len(self.so_far)
            line, self._read = self.so_far[self._read : end], end
            return line

    def read(self, timeout: float = HANG) -> str:
        """The rest, once every process that holds the pipe has ended."""
        with self._changed:
            ended = self._changed.wait_for(lambda: self._ended, timeout)
            assert ended, f"a process holds the pipe after {timeout:.0f} s; it wrote {self.so_far!r}"
            rest, self._read = self.so_far[self._read :], len(self.so_far)
            return rest

    def __iter__(self) -> Iterator[str]:
        return iter(self.readline, "")


class Program:
    """A program that runs.

    Args:
        words: its command line.
        env: changes of the environment.
        cwd: its directory; default: that of the tests.
        enter: runs in the new process before the program.
        stdin: :data:`subprocess.PIPE`, or nothing to read.
        session: give it a session of its own.
        fork: run it as a fork (:mod:`tests.support.forks`), if its variables allow that.

    Attributes:
        pid: the id of its process.
        stdout, stderr: its output.
    """

    def __init__(
        self,
        words: Sequence[str],
        *,
        env: dict[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        enter: Enter | None = None,
        stdin: int = subprocess.DEVNULL,
        session: bool = False,
        fork: bool = False,
    ) -> None:
        self.words = list(words)
        variables = variables_with(env)
        self._process: subprocess.Popen[str] | Fork
        if fork and enter is None and self.words[0] == sys.executable and SERVER.can_start(variables):
            self._process = SERVER.start(self.words, env=variables, cwd=cwd, stdin=stdin, session=session)
        else:
            self._process = subprocess.Popen(
                self.words,
                env=variables,
                cwd=cwd,
                preexec_fn=enter,
                start_new_session=session,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                errors="replace",
            )
        started.append(self)
        self.pid, self.stdin = self._process.pid, self._process.stdin
        self.stdout, self.stderr = Output(self._process.stdout), Output(self._process.stderr)
        self.send_signal, self.terminate, self.kill, self.poll = (
            self._process.send_signal,
            self._process.terminate,
            self._process.kill,
            self._process.poll,
        )

    @property
    def so_far(self) -> str:
        """Everything that it has printed."""
        return f"{self.stdout.so_far}--- errors:\n{self.stderr.so_far}"

    @property
    def returncode(self) -> int | None:
        """The exit code; None while it runs."""
        return self._process.poll()

    def wait(self) -> int:
        """Wait for its end; returns the exit code."""
        return self._process.wait(HANG)

    def communicate(self, stdin: str = "", timeout: float = HANG) -> tuple[str, str]:
        """Write to its standard input, and wait for the end of every process that holds its output.

        Returns:
            The output and the errors that have not been read yet.
        """
        if self.stdin is not None and not self.stdin.closed:
            with self.stdin as stream:
                stream.write(stdin)
        result = self.stdout.read(timeout), self.stderr.read(timeout)
        self.wait()
        return result


def variables_with(changes: dict[str, str] | None) -> dict[str, str]:
    """The environment of a program that a test starts, with changes; without what packages have set here."""
    variables = {name: value for name, value in os.environ.items() if name not in _SET_HERE}
    return {**variables, "OMP_NUM_THREADS": "1", **(changes or {})}


def start_program(words: Sequence[str], *, before: Sequence[str] = (), **settings: Any) -> Program:
    """Start ``python …``.

    Args:
        before: words in front of Python, such as ``nohup``.
        settings: arguments of :class:`Program`.
    """
    return Program([*before, sys.executable, *words], **settings)


def start_command(words: Sequence[str], **settings: Any) -> Program:
    """Start ``mirrored …`` or ``torchrun …``; settings as those of :func:`start_program`."""
    module = {"mirrored": ["tests.support.started", "mirrored"], "torchrun": ["torch.distributed.run"]}[words[0]]
    return start_program(["-m", *module, *words[1:]], fork=True, **settings)


def start_function(function: Callable[..., Any], *args: Any, **settings: Any) -> Program:
    """Start a program that calls a function of a module of the tests with arguments that JSON can hold."""
    name = f"{function.__module__}:{function.__qualname__}"
    return start_program(["-m", "tests.support.started", "call", name, json.dumps(args)], fork=True, **settings)


def run_program(words: Sequence[str], **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run ``python …`` to its end; see :func:`_to_its_end`."""
    return _to_its_end(start_program, words, **settings)


def run_command(words: Sequence[str], **settings: Any) -> subprocess.CompletedProcess[str]:
    """Run ``mirrored …`` or ``torchrun …`` to its end; see :func:`_to_its_end`."""
    return _to_its_end(start_command, words, **settings)


def _to_its_end(
    start: Callable[..., Program],
    words: Sequence[str],
    *,
    stdin: str | None = None,
    timeout: float = HANG,
    code: int | None = None,
    **settings: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end.

    Args:
        stdin: text for its standard input.
        code: the exit code that it must have; default: any.
        settings: arguments of ``start``.
    """
    program = start(words, stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE, **settings)
    output, errors = program.communicate(stdin or "", timeout)
    return check_code(subprocess.CompletedProcess(words, program.wait(), output, errors), code)


def check_code(result: subprocess.CompletedProcess[str], code: int | None) -> subprocess.CompletedProcess[str]:
    """The result, which must have this exit code; None: any."""
    text = f"{result.args} ended with exit code {result.returncode}: {result.stdout}{result.stderr}"
    assert code is None or ended_with(code, result.args, result.returncode, result.stderr), text
    return result


def ended_with(code: int, words: Sequence[str], returncode: int | None, errors: str) -> bool:
    """Whether a program has ended with this exit code.

    torchrun may abort after its job has failed, while its interpreter ends: a thread returns from a store in C++ (torch
    2.13; ``run`` of :mod:`towers.launching.starting.agent` avoids it). The abort then hides its exit code.
    """
    is_torchrun = any("torchrun" in word or word == "torch.distributed.run" for word in words)
    aborted = returncode == -signal.SIGABRT and "terminate called without an active exception" in errors
    return returncode == code or (code != 0 and is_torchrun and aborted)


def end_of(program: Program, code: int) -> tuple[str, str]:
    """The rest of a program's output and errors; it must end with this exit code."""
    output, errors = program.communicate()
    is_right = ended_with(code, program.words, program.returncode, errors)
    assert is_right, f"exit code {program.returncode}: {output}{errors}"
    return output, errors
