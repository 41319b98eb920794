"""import-linter's contracts (pyproject.toml) hold, and each of them fails when a line is moved back."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.support.jobs import ROOT
from tests.support.waiting import HANG

MOVED_BACK = {
    "down": ("towers/system/tree.py", "from mirrored.losses import Reduction"),
    "circles": ("mirrored/context.py", "from mirrored.strategy.base import Strategy"),
    "core": ("mirrored/losses.py", "from mirrored.checkpoint.manager import CheckpointManager"),
    "collectives": ("towers/gradients/buckets.py", "from towers.collectives.shared_memory.regions import Regions"),
}
"""For each contract a module, and an import that breaks it."""


def lint(folder: pathlib.Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()"]
    return subprocess.run(
        [*command, "--no-cache", "--no-logo"], cwd=folder, text=True, capture_output=True, timeout=HANG
    )


def copy_to(folder: pathlib.Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", folder)
    for package in ("mirrored", "towers"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))


def test_the_contracts_hold(tmp_path: pathlib.Path) -> None:
    copy_to(tmp_path)
    result = lint(tmp_path)
    assert result.returncode == 0, result.stdout
    assert f"Contracts: {len(MOVED_BACK)} kept, 0 broken." in result.stdout


@pytest.mark.parametrize("contract", MOVED_BACK)
def test_a_line_that_is_moved_back_breaks_its_contract(contract: str, tmp_path: pathlib.Path) -> None:
    copy_to(tmp_path)
    name, line = MOVED_BACK[contract]
    module = tmp_path / name
    text = module.read_text()
    at = text.index("from __future__ import annotations\n") + len("from __future__ import annotations\n")
    module.write_text(f"{text[:at]}\nfrom typing import TYPE_CHECKING\n\nif TYPE_CHECKING:\n    {line}\n{text[at:]}")
    result = lint(tmp_path)
    assert result.returncode == 1
    broken = [found for found in result.stdout.splitlines() if " BROKEN" in found]
    assert broken, result.stdout
    config = (ROOT / "pyproject.toml").read_text()
    title = config.split(f'id = "{contract}"\nname = "')[1].split('"')[0]
    assert any(found.startswith(title[:40]) for found in broken), result.stdout
