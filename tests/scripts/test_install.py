"""The project installed from a clone and from a wheel, in environments that have nothing else of ours."""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import venv

import pytest

import mirrored
from tests.support.jobs import ROOT
from tests.support.waiting import HANG

pytestmark = pytest.mark.slow

_PARTS = ("mirrored", "towers", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture
def clone(tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of what an installation needs of this folder, in one that is named ``mirrored`` as a clone is."""
    folder = tmp_path / "above" / "mirrored"
    folder.mkdir(parents=True)
    for part in _PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / part, folder / part)
    return folder


@pytest.fixture
def python(tmp_path: pathlib.Path) -> pathlib.Path:
    """The Python of a new environment, in which torch and the others can be found, but not this project."""
    venv.create(tmp_path / "venv", with_pip=False)
    packages = next((tmp_path / "venv" / "lib").glob("python*/site-packages"))
    others = packages / "others"
    others.mkdir()
    for path in pathlib.Path(sysconfig.get_path("purelib")).iterdir():
        if "mirrored" not in path.name and path.suffix != ".pth":
            (others / path.name).symlink_to(path)
    (packages / "others.pth").write_text(f"{others}\n")
    return tmp_path / "venv" / "bin" / "python"


def install(python: pathlib.Path, *words: str) -> None:
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", "--no-deps"]
    run([*pip, "--no-build-isolation", "--disable-pip-version-check", *words])


def run(words: list[str], cwd: pathlib.Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it holds this folder
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANG, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_editable_install_is_found_from_the_folder_that_holds_the_clone(
    clone: pathlib.Path, python: pathlib.Path
) -> None:
    install(python, "--editable", str(clone))
    program = "import mirrored; print(mirrored.__file__, mirrored.MirroredStrategy.__name__)"
    said = run([str(python), "-c", program], cwd=clone.parent)
    assert said.split() == [str(clone / "mirrored" / "__init__.py"), "MirroredStrategy"]


def test_a_wheel_has_all_that_the_project_needs(clone: pathlib.Path, python: pathlib.Path) -> None:
    wheels = clone.parent / "wheels"
    building = ["wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels)]
    run([sys.executable, "-m", "pip", *building, str(clone)])
    install(python, *map(str, wheels.iterdir()))
    shutil.rmtree(clone)
    packages = next((python.parent.parent / "lib").glob("python*/site-packages"))
    names = {path.relative_to(ROOT) for part in _PARTS[:2] for path in (ROOT / part).rglob("*.py")}
    names |= {pathlib.Path(part, "py.typed") for part in _PARTS[:2]}
    assert sorted(name for name in names if not (packages / name).is_file()) == []
    assert run([str(python.parent / "mirrored"), "--version"]).strip() == f"mirrored {mirrored.__version__}"
    program = """
import importlib.metadata
import mirrored
import mirrored.keras

strategy = mirrored.OneDeviceStrategy()
print(mirrored.__file__)
print(strategy.run(lambda: 3), importlib.metadata.version("mirrored"))
print([point.value for point in importlib.metadata.entry_points(group="torch.distributed.backends")])
"""
    said = run([str(python), "-c", program], cwd=clone.parent)
    assert said.splitlines() == [
        str(packages / "mirrored" / "__init__.py"),
        f"3 {mirrored.__version__}",
        "['towers.backend:register']",
    ]
