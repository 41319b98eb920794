"""Starts programs of the tests as forks of a process that has loaded torch and its compiler.

A new Python needs seconds of a core to load both, a fork hundredths of a second. The program finds the same state as in
a new Python, with the exceptions in [Note: a fork in place of a new Python] of
:mod:`towers.launching.starting.fork_server`. The commands ``mirrored`` and ``torchrun``, agents, and functions of the
tests are forks. Scripts that tests start with ``python``, and the towers of torchrun, are new Pythons.
"""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, NoReturn

from tests.support.waiting import HANG
from towers.launching.starting import fork_server

_LONGEST = 1 << 17  # bytes of a request
_INHERITED = 500  # the first descriptor that programs keep: tests/support/startup

_EARLY = re.compile("PYTHON|TORCH|PYTORCH|OMP_|KMP_|MKL_|OPENBLAS|LD_|LC_|LANG|TZ|TMP|TEMP|RES_|GLIBC|CUDA|TPU")
"""Variables that are read while Python, the C library and torch are loaded."""


class Fork(fork_server.Process):
    """A program that is a fork of the server. Its parent is this process, like that of :class:`subprocess.Popen`.

    Attributes:
        stdin, stdout, stderr: this process's ends of its pipes.
    """

    def __init__(self, pid: int, stdin: IO[str] | None, stdout: IO[str], stderr: IO[str]) -> None:
        super().__init__(pid)
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Server:
    """The server of this process.

    Attributes:
        pid: its process; None: no program has been started yet.
        variables: its environment, without what single tests change.
        adopts: whether this process becomes the parent of processes whose parent has ended, as the programs' has.
    """

    _requests: socket.socket

    def __init__(self) -> None:
        self.pid: int | None = None
        self.variables: dict[str, str] = {}
        self.adopts = False
        self._lock = threading.Lock()

    def can_start(self, variables: Mapping[str, str]) -> bool:
        """Whether a fork finds the variables that a new Python would read while it is loaded."""
        simulated = "MIRRORED_SIMULATED" in variables
        return self.adopts and not simulated and _early(variables) == _early(self.variables)

    def _load(self) -> None:
        self._requests, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests.settimeout(HANG)
        words = [sys.executable, "-m", "tests.support.forks", str(other.fileno())]
        null = subprocess.DEVNULL
        server = subprocess.Popen(
            words, env=self.variables, pass_fds=[other.fileno()], stdin=null, stdout=null, stderr=null
        )
        other.close()
        server.returncode = 0  # it ends with this process, which does not wait for it
        self.pid = server.pid

    def start(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: str | os.PathLike[str] | None,
        stdin: int,
        session: bool,
    ) -> Fork:
        """Starts a program of this Python; arguments as those of :class:`tests.support.programs.Program`."""
        read_out, out = os.pipe()
        read_err, err = os.pipe()
        read_in, write_in = os.pipe() if stdin == subprocess.PIPE else (os.open(os.devnull, os.O_RDONLY), None)
        request = json.dumps([list(words), dict(env), os.fspath(cwd or os.getcwd()), session]).encode()
        with self._lock:
            if self.pid is None:
                self._load()
            socket.send_fds(self._requests, [request], [read_in, out, err])
            pid = int(self._requests.recv(_LONGEST))
        for descriptor in (read_in, out, err):
            os.close(descriptor)
        output, errors = (os.fdopen(each, encoding="utf-8", errors="replace") for each in (read_out, read_err))
        return Fork(pid, None if write_in is None else os.fdopen(write_in, "w", encoding="utf-8"), output, errors)


def _early(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if _EARLY.match(name)}


SERVER = Server()


def serve(requests: socket.socket) -> NoReturn:
    """Forks programs until the process of the tests has ended."""
    path = sys.path[1:]
    gc.disable()
    from mirrored import cli  # noqa: F401
    from towers.launching.starting import agent  # noqa: F401
    from towers.system.torch_private import load_compiler

    load_compiler()
    from tests.support import huge_pages  # noqa: F401

    gc.freeze()
    gc.enable()
    while True:
        request, descriptors, _, _ = socket.recv_fds(requests, _LONGEST, 3)
        if not request:
            os._exit(0)
        if fork_server.fork_orphan():
            requests.send(str(os.getpid()).encode())
            _become(*json.loads(request), descriptors, path)
        for descriptor in descriptors:
            os.close(descriptor)


def _become(
    words: list[str], variables: dict[str, str], cwd: str, session: bool, descriptors: list[int], path: list[str]
) -> NoReturn:
    if session:
        os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    os.closerange(3, _INHERITED)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    fork_server.become_program(words, path)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
