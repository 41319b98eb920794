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


def test_the_loss_is_that_of_one_device() -> None:
    alone, together = losses("--workers", "0"), losses()
    assert len(alone) == len(together) == 3
    assert alone[-1] < 0.9 * alone[0]
    assert together[-1] == pytest.approx(alone[-1], rel=0.02)


def test_verify_compares_no_parameter_servers_and_names_the_line() -> None:
    report = mirrored.verify(PROGRAM)
    assert (report.exit_code, report.causes) == (2, (Cause.ASYNCHRONOUS,)), report
    lines = (ROOT / "examples" / "recommender.py").read_text().splitlines()
    line = 1 + next(i for i, text in enumerate(lines) if "mirrored.ParameterServerStrategy(" in text)
    assert f"it trains with ParameterServerStrategy (line {line})" in " ".join(str(report).split())
