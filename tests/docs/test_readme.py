"""What the README tells a newcomer to type, and what two pages add to its program (tests/docs runs all programs)."""

from __future__ import annotations

import os
import pathlib
import re

import pytest

from tests.support.commands import run_command
from tests.support.jobs import ROOT, run_program

pytestmark = pytest.mark.slow

README = (ROOT / "README.md").read_text()


def first_program(text: str) -> str:
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]


PROGRAM = first_program(README)
EXACT, SAVED = (first_program((ROOT / "docs" / page).read_text()) for page in ("exactness.md", "checkpoints.md"))


def losses_of(program: str, tmp_path: pathlib.Path) -> list[list[float]]:
    """What the program prints on one and on two towers."""
    script = tmp_path / "train.py"
    script.write_text(program)
    found = []
    one = run_program([str(script)], cwd=str(tmp_path))
    two = run_command(["mirrored", "run", "--towers", "2", str(script)], cwd=str(tmp_path))
    for result in (one, two):
        assert result.returncode == 0, result.stderr
        found.append([float(loss) for loss in re.findall(r"epoch \d: loss ([0-9.e-]+)", result.stdout)])
        assert len(found[-1]) == 5
        assert found[-1][-1] < found[-1][0]
    return found


def test_the_script_runs_on_one_and_on_two_towers(tmp_path: pathlib.Path) -> None:
    losses_of(PROGRAM, tmp_path)


def test_what_is_said_about_virtual_towers_gives_the_same_bits(tmp_path: pathlib.Path) -> None:
    first, step = EXACT.split("...\n")
    program = re.sub(r"strategy = .*\n", first, PROGRAM)
    program = re.sub(r"def train_step.*?\n\n\n", step + "\n\n", program, flags=re.DOTALL)
    program = re.sub(r'strategy\.reduce\("sum", (strategy\.run\(train_step, .*\))\)', r"\1", program)
    program = program.replace(":.4f}", "!r}")
    assert program.count("strategy.backward(") == 1
    one, two = losses_of(program, tmp_path)
    assert one == two


def test_what_is_said_about_checkpoints_goes_on(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM[: PROGRAM.index("for epoch")] + SAVED)
    words = ["mirrored", "run", "--towers", "2", str(script)]
    errors = []
    for _ in range(2):
        result = run_command(words, cwd=str(tmp_path))
        assert result.returncode == 0, result.stderr
        errors.append(result.stderr)
    assert "goes on from" not in errors[0]
    assert "goes on from results/run/step-00000080, after step 80" in errors[1]


def test_the_commands_exist() -> None:
    commands = re.findall(r"^(scripts/\w+)$", README, re.MULTILINE)
    assert commands == ["scripts/demo", "scripts/test"]
    others = ["scripts/two_workers", "scripts/gpu_check", "scripts/bench", "scripts/faults", ".ci/run"]
    for command in [*commands, *others]:
        assert os.access(ROOT / command, os.X_OK), command
