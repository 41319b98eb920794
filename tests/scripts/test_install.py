"""The project installed from a clone and from a wheel, in environments that have what it requires and nothing else; and
what ``scripts/setup`` takes for installed: the extras that are, and no others."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable, Sequence

import pytest
from packaging.requirements import Requirement

import mirrored
from tests.support.jobs import ROOT
from tests.support.waiting import HANG

pytestmark = pytest.mark.extended

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
    """The Python of a new environment, which is empty."""
    venv.create(tmp_path / "venv", with_pip=False)
    packages = packages_of(tmp_path / "venv" / "bin" / "python")
    (packages / "others").mkdir()
    (packages / "others.pth").write_text(f"{packages / 'others'}\n")
    return tmp_path / "venv" / "bin" / "python"


def packages_of(python: pathlib.Path) -> pathlib.Path:
    return next((python.parent.parent / "lib").glob("python*/site-packages"))


@pytest.fixture
def wheel(clone: pathlib.Path) -> pathlib.Path:
    wheels = clone.parent / "wheels"
    building = ["wheel", "--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels)]
    run([sys.executable, "-m", "pip", *building, str(clone)])
    shutil.rmtree(clone)
    [wheel] = wheels.iterdir()
    return wheel


def metadata_of(wheel: pathlib.Path) -> importlib.metadata.Distribution:
    [folder] = [path for path in zipfile.Path(wheel).iterdir() if path.name.endswith(".dist-info")]
    return importlib.metadata.PathDistribution(folder)  # type: ignore[arg-type]


def required(requirements: Iterable[str] | None, extra: str = "") -> list[Requirement]:
    """Those that hold here, with an extra or without."""
    read = map(Requirement, requirements or ())
    return [each for each in read if each.marker is None or each.marker.evaluate({"extra": extra})]


def provide(python: pathlib.Path, requirements: Sequence[Requirement]) -> None:
    """Let an environment find what these require, and what that requires, where this environment has it."""
    others, todo, seen = packages_of(python) / "others", list(requirements), set[Requirement]()
    while todo:
        each = todo.pop()
        if each in seen:
            continue
        seen.add(each)
        distribution = importlib.metadata.distribution(each.name)
        for extra in ("", *each.extras):
            todo += required(distribution.requires, extra)
        for top in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            if not (others / top).exists() and not top.endswith(".pth"):
                (others / top).symlink_to(pathlib.Path(str(distribution.locate_file(top))))


def install(python: pathlib.Path, *words: str) -> None:
    """By pip, which finds that all requirements are there, or fails."""
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "--no-build-isolation"]
    said = run([*pip, "--disable-pip-version-check", *words])
    assert "does not provide the extra" not in said


def run(words: list[str], cwd: pathlib.Path | None = None, **variables: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # it holds this folder
    environment |= variables
    done = subprocess.run(words, capture_output=True, text=True, timeout=HANG, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_an_editable_install_is_found_from_the_folder_that_holds_the_clone(
    clone: pathlib.Path, python: pathlib.Path
) -> None:
    provide(python, required(["numpy", "safetensors", "torch", "setuptools"]))
    install(python, "--editable", str(clone))
    program = "import mirrored; print(mirrored.__file__, mirrored.MirroredStrategy.__name__)"
    said = run([str(python), "-c", program], cwd=clone.parent)
    assert said.split() == [str(clone / "mirrored" / "__init__.py"), "MirroredStrategy"]


IMPORT_ALL = """
import importlib
import pkgutil
import mirrored
import towers

for package in (mirrored, towers):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        need_extras = ("mirrored.keras", "mirrored.lightning", "mirrored.parameter_server.", "mirrored.transformers")
        if not module.name.startswith(need_extras) and not module.name.endswith("__main__"):
            importlib.import_module(module.name)
"""


def test_a_wheel_has_all_that_the_project_needs(wheel: pathlib.Path, python: pathlib.Path) -> None:
    requirements = metadata_of(wheel).requires
    provide(python, required(requirements))
    install(python, str(wheel))
    packages = packages_of(python)
    names = {path.relative_to(ROOT) for part in _PARTS[:2] for path in (ROOT / part).rglob("*.py")}
    names |= {pathlib.Path(part, "py.typed") for part in _PARTS[:2]}
    names |= {path.relative_to(ROOT) for path in (ROOT / "mirrored/starter").rglob("*-tpl")}
    assert sorted(name for name in names if not (packages / name).is_file()) == []
    assert run([str(python.parent / "mirrored"), "--version"]).strip() == f"mirrored {mirrored.__version__}"
    run([str(python.parent / "mirrored"), "new", "demo"], cwd=wheel.parent)
    assert (wheel.parent / "demo/requirements.txt").read_text() == f"./wheels/{wheel.name}\n"
    assert (wheel.parent / "demo/.github/workflows/test.yml").is_file()
    program = f"""{IMPORT_ALL}
import importlib.metadata
import importlib.util

strategy = mirrored.OneDeviceStrategy()
print(mirrored.__file__)
print(strategy.run(lambda: 3), importlib.metadata.version("mirrored"))
print([point.value for point in importlib.metadata.distribution("mirrored").entry_points if "backends" in point.group])
print([name for name in ("keras", "torchmetrics", "cloudpickle", "tqdm", "pytest") if importlib.util.find_spec(name)])
"""
    said = run([str(python), "-c", program], cwd=wheel.parent)
    assert said.splitlines() == [
        str(packages / "mirrored" / "__init__.py"),
        f"3 {mirrored.__version__}",
        "['towers.backend:register']",
        "[]",
    ]
    provide(python, required(requirements, "keras"))
    install(python, f"{wheel}[keras]")
    run([str(python), "-c", "import mirrored.keras"], cwd=wheel.parent)


BROUGHT = {"keras": {"keras"}, "metrics": {"torchmetrics"}, "notebook": {"cloudpickle"}, "servers": {"ray"}}
BROUGHT |= {"progress": {"tqdm"}, "tensorboard": {"tensorboard"}, "lightning": {"lightning"}}
BROUGHT |= {"transformers": {"transformers", "accelerate"}}
"""By extra: the packages that a part of ours imports, or lets torch import."""


def test_what_is_imported_is_required_or_brought_by_an_extra(wheel: pathlib.Path) -> None:
    metadata = metadata_of(wheel)
    always = {each.name for each in required(metadata.requires)}
    by_extra = {extra: {each.name for each in required(metadata.requires, extra)} - always for extra in BROUGHT}
    assert by_extra == BROUGHT
    imported = {name for part in _PARTS[:2] for path in (ROOT / part).rglob("*.py") for name in imports(path)}
    others = imported - sys.stdlib_module_names - {"mirrored", "towers", "pytorch_lightning"}  # Lightning's older name
    assert others == (always | set().union(*BROUGHT.values())) - {"tensorboard"}
    table = (ROOT / "docs/get-started/install.md").read_text().partition("| extra |")[2].partition("\n\n")[0]
    extras = metadata.metadata.get_all("Provides-Extra") or []
    assert sorted(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == sorted(extras)


def imports(path: pathlib.Path) -> set[str]:
    """The packages that a module imports, also in functions."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


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
        run([str(tmp_path / "scripts" / "setup"), extra], PYTHON=sys.executable)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert [line.split(" ")[-1] for line in asked] == [f".[{first}]", f".[{then}]"][: 1 + installs]
