"""``scripts/luck`` finds the condition under which a test fails."""

from __future__ import annotations

import pathlib
import re

import pytest

from tests.support.jobs import ROOT
from tests.support.programs import run_program

pytestmark = pytest.mark.extended

LUCK = str(ROOT / "scripts" / "luck.py")
FAILS = """
import os

import pytest

def test_that_needs_an_order():
    assert "TESTS_ORDER" not in os.environ, "another order"

def test_that_needs_nothing():
    pass

@pytest.mark.seconds
def test_that_promises_seconds():
    raise AssertionError("it needs a quiet machine")
"""


def test_a_test_that_fails_under_one_condition_is_named(tmp_path: pathlib.Path) -> None:
    (tmp_path / "test_it.py").write_text(FAILS)
    result = run_program([LUCK, "--times", "2", "--seed", "7", "quiet", "order", "--", str(tmp_path)], code=1)
    assert result.stdout.startswith("seed 7; outputs are in results/luck/")
    table = result.stdout[result.stdout.index("\ncondition ") :]
    assert re.search(r"^quiet +2 +0$", table, re.MULTILINE), table
    assert re.search(r"^order +2 +2$", table, re.MULTILINE), table
    assert re.search(r"1 tests? failed:\n\S*test_it.py::test_that_needs_an_order\n +order 2\n +.*another order", table)


@pytest.mark.parametrize("words", [["hurry"], ["--hurry"], ["--times", "often"]])
def test_mistakes_are_errors_with_the_usage(words: list[str]) -> None:
    result = run_program([LUCK, *words], code=2)
    assert result.stderr.startswith("usage: scripts/luck")
    assert words[0] in result.stderr
