"""The page that lists TensorFlow's tests names tests that are there."""

from __future__ import annotations

import ast
import pathlib
import re

from tests.support.jobs import ROOT

FOLDER = pathlib.Path(__file__).parent


def test_the_tests_that_are_named_are_there() -> None:
    page = (ROOT / "tests/parameter_server/tensorflow.md").read_text()
    rows = re.findall(r"^\| `[^|]*\| ([^|]*) \|$", page, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(test_\w+)`", row)}
    tests = {
        node.name
        for path in FOLDER.glob("test_*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert len(rows) > 50
    assert len(named) > 20
    assert named - tests == set()
