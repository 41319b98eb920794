"""Steps that are taken in another program, which takes one for each line it is given and answers with a line."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Mapping


class Program:
    """A step in another program; call it to take one.

    Args:
        path: of the program.
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
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        if not self._process.stdout.readline():
            raise RuntimeError(f"{self._name} ended with exit code {self._process.wait(10)}")
