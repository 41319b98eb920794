"""``mirrored new``: the project that it makes passes what its own CI runs; a folder of somebody else's stays."""

from __future__ import annotations

import pathlib
import re
import shlex
import subprocess
import sys

import pytest
import yaml

import mirrored
from mirrored import cli
from tests.support.jobs import ROOT
from tests.support.programs import run_program

FILES = [".github/workflows/test.yml", ".gitignore", "Dockerfile", "README.md", "requirements.txt"]
FILES += ["test_train.py", "train.py"]


def files_in(folder: pathlib.Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_project_has_its_name_and_the_next_two_commands(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "Two Words" / "My-Spirals"
    assert cli.main(["new", str(folder)]) == 0
    commands = re.findall(r"^    (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert commands == [f"cd '{folder}' && python -m pytest", "mirrored run --towers 2 train.py"]
    assert files_in(folder) == FILES
    assert not [name for name in FILES if "@name@" in (folder / name).read_text()]
    readme = (folder / "README.md").read_text()
    assert readme.startswith("# My-Spirals\n")
    assert "docker build -t my-spirals .\n" in readme
    wheel = f"./wheels/mirrored-{mirrored.__version__}-py3-none-any.whl"
    assert (folder / "requirements.txt").read_text() == f"{wheel}\n"
    copied = re.findall(r"^COPY (\S+) ", (folder / "Dockerfile").read_text(), re.MULTILINE)
    assert sorted(copied) == ["requirements.txt", "train.py", "wheels"]


def test_its_style_is_ruffs(tmp_path: pathlib.Path) -> None:
    cli.main(["new", str(tmp_path / "demo")])
    for words in (["check", "--select=E,F,W,I,B,UP"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *words, "--isolated", "--no-cache", "--line-length=120", "."]
        done = subprocess.run(command, cwd=tmp_path / "demo", capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


@pytest.mark.extended
def test_a_project_passes_what_its_ci_runs(tmp_path: pathlib.Path) -> None:
    cli.main(["new", str(tmp_path / "demo")])
    workflow = yaml.safe_load((tmp_path / "demo/.github/workflows/test.yml").read_text())
    commands = [shlex.split(step["run"]) for step in workflow["jobs"]["test"]["steps"] if "run" in step]
    assert [words[:3] for words in commands] == [
        ["pip", "install", "--extra-index-url"],
        ["python", "-m", "pytest"],
        ["mirrored", "verify", "train.py"],
    ]
    settings = {"cwd": str(tmp_path / "demo"), "env": {"PYTHONPATH": str(ROOT)}}
    assert "2 passed" in run_program(commands[1][1:], code=0, **settings).stdout
    run_program(["-m", *commands[2]], code=0, **settings)


def test_an_empty_folder_becomes_one(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path / "demo")
    assert cli.main(["new", "."]) == 0
    assert files_in(tmp_path / "demo") == FILES


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("full", "the folder .*full is not empty: name a new one"),
        ("full/file", ".*file is a file: name a new folder"),
        ("full/file/demo", "Not a directory"),
        *((name, f"'{name}' cannot be the name of a project") for name in ("my project", "-demo", "a..b", "größe")),
    ],
)
def test_what_cannot_be_a_project(
    name: str, said: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("somebody's")
    with pytest.raises(SystemExit) as ended:
        cli.main(["new", str(tmp_path / name)])
    assert ended.value.code == 2
    assert re.search(f"^mirrored: error: .*{said}", capsys.readouterr().err, re.MULTILINE)
    assert files_in(tmp_path) == ["full/file"]
