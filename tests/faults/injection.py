"""One fault, played with real processes: how the run ends, what it leaves, and what comes of it when it goes on."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import pathlib
import re
import secrets
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import mirrored
from tests.faults.faults import Fault
from tests.faults.training import train
from tests.support import shared_memory
from tests.support.programs import run_command
from tests.support.waiting import HANG

PROGRAM = ["-m", "tests.faults.program"]
DEADLINE = 3.0  # seconds that a collective may take after a fault that nothing else ends
_MARK = "FAULT_INJECTION_RUN"

Result = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a run ended.

    Attributes:
        code: exit code.
        seconds: from the fault to the end; 0 where there was none.
        errors: what it printed to standard error.
        result: what it printed at last, if it came so far.
        left: what it left behind that it should not.
    """

    code: int
    seconds: float
    errors: str
    result: Result | None
    left: list[str]

    @property
    def last_line(self) -> str:
        lines = self.errors.strip().splitlines()
        return lines[-1] if lines else ""


def run(folder: pathlib.Path, fault: Fault | None = None, *, towers: int = 3, arguments: Sequence[str] = ()) -> Ended:
    """Run the program to its end, or to that of the fault."""
    words = ["mirrored", "run", "--towers", str(towers), *PROGRAM, str(folder), "--towers", str(towers)]
    if fault is not None:
        words += ["--fault", str(fault)]
    if (deadline := _deadline(fault)) is not None:
        words += ["--deadline", str(deadline)]
    mark = secrets.token_hex(8)
    shared = shared_memory.names()
    with tempfile.TemporaryDirectory() as temporary:
        variables = {"OMP_NUM_THREADS": "1", "TMPDIR": temporary, _MARK: mark}
        process = run_command([*words, *arguments], env=variables)
        ended = time.time()
        left = [*map(str, pathlib.Path(temporary).glob("towers-*")), *shared_memory.left(shared)]
    begun = pathlib.Path(f"{folder}.fault")
    seconds = ended - begun.stat().st_mtime if fault is not None and begun.exists() else 0.0
    lines = process.stdout.strip().splitlines()
    result = json.loads(lines[-1]) if process.returncode == 0 else None
    return Ended(
        process.returncode, seconds, process.stderr, result, [f"left {path}" for path in left] + _processes(mark)
    )


def _train(folder: str, fault: Fault | None) -> dict[str, Any]:
    return train(mirrored.MirroredStrategy(seed=0), folder, fault=fault, deadline=_deadline(fault))


def _deadline(fault: Fault | None) -> float | None:
    return DEADLINE if fault is not None and fault.action == "SIGSTOP" else None


def launched(folder: pathlib.Path, fault: Fault | None = None, towers: int = 3) -> dict[str, Any]:
    """What comes out on towers that come from a fork server, as the program prints it."""
    found = mirrored.launch(_train, (str(folder), fault), towers=towers, timeout=HANG)
    return {key: found[0][key] for key in ("losses", "seen", "steps")} | {"digests": [one["digest"] for one in found]}


def problems(fault: Fault, ended: Ended, limit: float) -> list[str]:
    """What is not as it must be about the end of a run with a fault, which may take ``limit`` seconds."""
    found = list(ended.left)
    if ended.seconds == 0.0:
        found.append("the fault did not happen")
    if ended.seconds > limit:
        found.append(f"ended {ended.seconds:.1f} s after the fault, more than {limit:.0f} s")
    expected = {"SIGTERM": {75}, "SIGKILL": {137}}.get(fault.action)
    if ended.code == 0 or (expected is not None and ended.code not in expected):
        found.append(f"exit code {ended.code}")
    named = [r"\bstep \d+"] + ([] if fault.action == "SIGTERM" else [rf"\btower {fault.tower}\b"])
    if not all(re.search(pattern, ended.last_line) for pattern in named):
        found.append(f"the last line is {ended.last_line!r}")
    return found


def differences(result: Result | None, undisturbed: Result) -> list[str]:
    """In what a run that went on differs from one that was never disturbed."""
    if result is None:
        return ["it did not come to its end"]
    return [f"other {key}" for key in undisturbed if result[key] != undisturbed[key]]


def undisturbed(*arguments: str, towers: int = 3) -> Result:
    """What the program comes to without faults."""
    with tempfile.TemporaryDirectory() as folder:
        ended = run(pathlib.Path(folder, "run"), towers=towers, arguments=arguments)
    assert ended.result is not None, ended.errors
    return ended.result


def inject(fault: Fault, expected: Result, limit: float, towers: int = 3) -> tuple[Ended, list[str]]:
    """A run with a fault, and one that resumes from what it left; returns the first's end, and all that is wrong.

    Args:
        limit: seconds from the fault to the end of the first.
    """
    with tempfile.TemporaryDirectory() as place:
        folder = pathlib.Path(place, "run")
        ended = run(folder, fault, towers=towers)
        found = problems(fault, ended, limit)
        again = run(folder, towers=towers)
        found += [f"gone on: {text}" for text in (*differences(again.result, expected), *again.left)]
        if again.result is None:
            found.append(again.last_line)
    return ended, found


def _processes(mark: str) -> list[str]:
    """Processes of a run that stay; those that are just ending do not."""
    deadline = time.monotonic() + HANG
    while True:
        found = []
        for path in pathlib.Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if f"{_MARK}={mark}".encode() in path.read_bytes():
                    found.append(f"process {path.parent.name} is still there")
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)
