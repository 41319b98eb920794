"""The example with a large table: what it learns with parameter servers is what one device learns."""

from __future__ import annotations

import re

import pytest

import mirrored
from mirrored.verification import Cause
from tests.support.jobs import ROOT
from tests.support.programs import run_program

pytest.importorskip("ray")

PROGRAM = str(ROOT / "examples" / "recommender.py")


def losses(*words: str) -> list[float]:
    """The losses of held-out ratings, by epoch."""
    result = run_program([PROGRAM, "--rows", "20000", "--epochs", "3", "--steps", "300", *words], code=0)
    return [float(loss) for loss in re.findall(r"of held-out ratings ([0-9.]+)", result.stdout)]


def test_one_worker_learns_what_one_device_learns() -> None:
    """Three workers push gradients of parameters that others have changed since, so their losses are only near."""
    alone = losses("--workers", "0")
    assert len(alone) == 3
    assert alone[-1] < 0.9 * alone[0]
    assert losses("--workers", "1") == alone
    # Gradients that are always two steps old cost 2.5 % here; a worker that is held up makes a few of its own older.
    assert losses() == pytest.approx(alone, rel=0.1)


def test_verify_compares_no_parameter_servers_and_names_the_line() -> None:
    report = mirrored.verify(PROGRAM)
    assert (report.exit_code, report.causes) == (2, (Cause.ASYNCHRONOUS,)), report
    lines = (ROOT / "examples" / "recommender.py").read_text().splitlines()
    line = 1 + next(i for i, text in enumerate(lines) if "mirrored.ParameterServerStrategy(" in text)
    assert f"it trains with ParameterServerStrategy (line {line})" in " ".join(str(report).split())
