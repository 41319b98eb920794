"""Jobs of tests/programs/unwell.py, in which a tower fails, dies, stops or is slow."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Sequence

from tests.support.commands import run_command
from tests.support.jobs import ROOT

UNWELL = str(ROOT / "tests" / "programs" / "unwell.py")


MIRRORED_RUN = ("mirrored", "run", "--towers")
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node")


def unwell(
    towers: int, *words: str, starter: Sequence[str] = MIRRORED_RUN
) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run the program on so many towers; its result, and the seconds from what happened to the end of all."""
    result = run_command([*starter, str(towers), UNWELL, *words])
    happened = re.search(r"^(?:\[tower \d\] )?([0-9]+\.[0-9]+)$", result.stderr, re.MULTILINE)
    assert happened, result.stderr
    return result, time.time() - float(happened[1])


def within(seconds: float, towers: int, *words: str) -> subprocess.CompletedProcess[str]:
    """As :func:`unwell`, over within so many seconds: the first time or, when other tests are in the way, the next."""
    result, took = unwell(towers, *words)
    if took >= seconds:
        result, took = unwell(towers, *words)
    assert took < seconds
    return result
