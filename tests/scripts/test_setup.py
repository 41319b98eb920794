"""What ``scripts/setup`` takes for installed: the extras that are, and no others."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.support.jobs import ROOT
from tests.support.waiting import HANG


@pytest.mark.parametrize(
    ("first", "then", "installs"),
    [("test", "examples", False), ("test", "docs", False), ("examples", "test", True), ("docs", "examples", True)],
)
def test_an_extra_is_installed_when_no_other_holds_it(
    tmp_path: pathlib.Path, first: str, then: str, installs: bool
) -> None:
    """pip writes down what it is asked for, in place of an installation."""
    for name in ("pyproject.toml", "constraints.txt", "scripts/setup"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@" >>asked\n')
    python.chmod(0o755)
    for extra in (first, then):
        done = subprocess.run(
            [str(tmp_path / "scripts" / "setup"), extra],
            env={**os.environ, "PYTHON": sys.executable},
            capture_output=True,
            text=True,
            timeout=HANG,
        )
        assert done.returncode == 0, done.stderr
    asked = (tmp_path / "asked").read_text().splitlines()
    assert [line.split(" ")[-1] for line in asked] == [f".[{first}]", f".[{then}]"][: 1 + installs]
