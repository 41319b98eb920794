"""What the README tells a newcomer to type."""

from __future__ import annotations

import os
import pathlib
import re

from jobs import ROOT, run_program

README = (ROOT / "README.md").read_text()


def test_the_script_runs_on_one_and_on_two_towers(tmp_path: pathlib.Path) -> None:
    [program] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    script = tmp_path / "train.py"
    script.write_text(program)
    for words in ([str(script)], ["-m", "mirrored", "run", "--towers", "2", str(script)]):
        result = run_program(words)
        assert result.returncode == 0, result.stderr
        losses = re.findall(r"epoch \d: loss ([0-9.]+)", result.stdout)
        assert len(losses) == 5
        assert float(losses[-1]) < float(losses[0])


def test_the_commands_exist() -> None:
    commands = re.findall(r"^(scripts/\w+)$", README, re.MULTILINE)
    assert commands == ["scripts/demo", "scripts/test"]
    for command in [*commands, "scripts/two_workers", "scripts/gpu_check", "scripts/bench", ".ci/run"]:
        assert os.access(ROOT / command, os.X_OK), command
    for link in re.findall(r"\]\(([\w./]+)\)", README):
        assert (ROOT / link).exists(), link
