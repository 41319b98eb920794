"""Jobs of tests/programs/prefetches.py, which save when they are told to end, beside threads that go on."""

from __future__ import annotations

import pathlib
from collections.abc import Callable

from tests.support.clusters import start_workers
from tests.support.jobs import ROOT
from tests.support.programs import Output, Program, start_command, start_program

PREFETCHES = str(ROOT / "tests" / "programs" / "prefetches.py")

STARTERS: dict[str, Callable[[list[str]], list[Program]]] = {
    "run": lambda words: [start_command(["mirrored", "run", "--towers", "2", PREFETCHES, *words])],
    "torchrun": lambda words: [start_command(["torchrun", "--standalone", "--nproc-per-node=2", PREFETCHES, *words])],
    "TF_CONFIG": lambda words: [*start_workers(PREFETCHES, *words)],
    "launch": lambda words: [start_program([PREFETCHES, *words, "launch"])],
}
"""How two towers are started: the processes that a person, or a scheduler, tells to end."""


def told_to_end(starter: str, folder: pathlib.Path, kind: str, where: str) -> list[Program]:
    """Start two towers, and send SIGTERM to all that was started once they train. They save only when all have it."""
    jobs = STARTERS[starter]([str(folder), kind, where])
    wait_for_line(jobs[0].stdout, "step 3\n")
    for job in jobs:
        job.terminate()
    return jobs


def wait_for_line(stream: Output, line: str) -> None:
    """Read until this line has come."""
    read = []
    while (found := stream.readline()) != line:
        assert found, f"its output ended before {line!r} came: {read}"
        read.append(found)
