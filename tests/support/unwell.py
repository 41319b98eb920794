"""Jobs of tests/programs/unwell.py, in which a tower fails, dies, stops or is slow."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Sequence

from tests.support.jobs import ROOT
from tests.support.meeting import FOLDER
from tests.support.programs import run_command

UNWELL = str(ROOT / "tests" / "programs" / "unwell.py")


MIRRORED_RUN = ("mirrored", "run", "--towers")
TORCHRUN = ("torchrun", "--standalone", "--nproc-per-node")


def unwell(
    towers: int, *words: str, starter: Sequence[str] = MIRRORED_RUN, code: int | None = 1
) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run the program on so many towers; its result, and the seconds from what happened to the end of all.

    Args:
        code: the exit code that it must have; None: any.
    """
    with tempfile.TemporaryDirectory() as folder:
        result = run_command([*starter, str(towers), UNWELL, *words], env={FOLDER: folder}, code=code)
    happened = re.search(r"^(?:\[tower \d\] )?([0-9]+\.[0-9]+)$", result.stderr, re.MULTILINE)
    assert happened, result.stderr
    return result, time.time() - float(happened[1])
