"""Steps that are taken in another program, which takes as many as a line says and answers with a line."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping


class Program:
    """Steps in another program.

    Args:
        path: the program's path.
        arguments: for it.
        environment: set there in addition.
    """

    def __init__(self, path: str, *arguments: object, environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, path, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        self._end = weakref.finalize(self, self._process.kill)
        self._name = os.path.basename(path)

    def __call__(self) -> None:
        """Take one step."""
        self.take(1)

    def take(self, steps: int) -> None:
        """Take some steps in one go, so that asking for them costs nothing."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        if not self._process.stdout.readline():
            raise RuntimeError(f"{self._name} ended with exit code {self._process.wait(10)}")


def serve(step: Callable[[], object]) -> None:
    """What the other program does until its input ends."""
    for line in sys.stdin:
        for _ in range(int(line)):
            step()
        print("done", flush=True)
