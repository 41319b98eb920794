"""How large the house may be: lines of code, of a file, and attributes of a class. The walls are import-linter's."""

from __future__ import annotations

import ast
import functools
import pathlib
import tempfile
from collections.abc import Iterator

import grimp

from tests.support.jobs import ROOT, run_program
from tests.verification.template import Script

PRODUCT, CORE = 23_398, 8_874
"""Lines of code that all of ``mirrored`` and ``towers`` may have, and its core. They fall, except by a new feature."""

AROUND = {"tests": 25_286, "scripts": 3_025}
"""Lines of code that Python files of other folders may have. They rise by what a new feature or a found fault needs."""

FILE_LINES = 400
ATTRIBUTES = 18

ASSEMBLERS = {
    *("mirrored", "mirrored.cli", "mirrored.__main__", "towers"),  # what users call
    *("mirrored.strategy.base", "mirrored.strategy.engine", "mirrored.strategy.gradients"),
    "mirrored.strategy.records",
    *("mirrored.losses", "mirrored.data.examples"),  # what a tower without examples needs
    *("mirrored.cluster", "mirrored.data.distribute", "towers.collectives.connecting"),  # one of several kinds
    "mirrored.strategy.kinds",  # what starting again needs
    *("towers.launching.agent", "towers.system.accelerator"),  # what several workers and one kind of device need
}
"""The modules of the core that may import annexes, when a script asks for them."""

DEFAULT_RUN = Script(
    strategy='mirrored.MirroredStrategy(devices=["cpu:0", "cpu:1"])',
    examples=7,
    data="(inputs, targets)",
    train="strategy.distribute_dataset(data, 3, shuffle=True)",
    epochs="1",
    run='strategy.reduce("sum", strategy.run(train_step, args=batch))',
    end="import sys\n\nstrategy.print(*sys.modules)",
)
"""What most scripts do, on two CPU towers."""

DEFAULT_AGENT = (
    "import sys; from towers.launching import agent, job; "
    "agent.run(job.Job(towers=2), [sys.executable, sys.argv[1]]); print(*sys.modules)"
)
"""The agent that such a script becomes, which lists its modules after those of the script."""

_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def modules(folders: tuple[str, ...] = ("mirrored", "towers")) -> Iterator[pathlib.Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def lines_of_code(path: pathlib.Path) -> int:
    """Lines with code on them: no blank ones, comments or docstrings; all lines of other strings."""
    text = path.read_text()
    lines = enumerate(text.split("\n"), 1)
    code = {number for number, line in lines if (begin := line.lstrip()) and not begin.startswith("#")}
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant | ast.JoinedStr) and (last := node.end_lineno or 0) > node.lineno:
            code.update(range(node.lineno, last + 1))
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(code - docstrings)


@functools.cache
def core() -> frozenset[str]:
    """The core: the modules that two towers of a script with default options load, and their agent, until they end."""
    with tempfile.TemporaryDirectory() as folder:
        script = pathlib.Path(folder, "script.py")
        script.write_text(DEFAULT_RUN.text())
        towers = run_program([str(script)], code=0)
        agent = run_program(["-c", DEFAULT_AGENT, str(script)], code=0)
    names = towers.stdout.split() + [name for name in agent.stdout.split() if name.partition(".")[0] == "towers"]
    return frozenset(names) & {name_of(path) for path in modules()}


def name_of(path: pathlib.Path) -> str:
    """A module's name."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def attributes(node: ast.ClassDef) -> set[str]:
    """What a class's methods assign on ``self``, and the fields that it declares."""
    declared = {part.target.id for part in node.body if isinstance(part, ast.AnnAssign) and _is_field(part)}
    assigned = {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)
        if isinstance(part.value, ast.Name) and part.value.id == "self"
    }
    return declared | assigned


def _is_field(part: ast.AnnAssign) -> bool:
    return isinstance(part.target, ast.Name) and "ClassVar" not in ast.unparse(part.annotation)


def test_lines_of_code() -> None:
    counts = {name_of(path): lines_of_code(path) for path in modules()}
    total, in_core = sum(counts.values()), sum(counts[name] for name in core())
    print(f"{total} lines of code, {in_core} of them in the core, which has {len(core())} of {len(counts)} modules")
    assert total <= PRODUCT
    assert in_core <= CORE


def test_lines_of_code_around_it() -> None:
    counts = {folder: sum(map(lines_of_code, modules((folder,)))) for folder in AROUND}
    print(counts)
    assert {folder: count for folder, count in counts.items() if count > AROUND[folder]} == {}


def test_the_core_imports_annexes_in_its_assemblers_only() -> None:
    graph = grimp.build_graph("mirrored", "towers", cache_dir=None)
    assert len(graph.modules) == len(list(modules()))
    importers = {name for name in core() if graph.find_modules_directly_imported_by(name) - core()}
    assert importers <= ASSEMBLERS
    assert not core() & {"towers.launching.restarts", "towers.launching.failure_broadcast"}
    assert importers >= {"mirrored.strategy.engine", "towers.collectives.connecting"}


def test_no_file_is_too_long() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in modules(("mirrored", "towers", "tests", "scripts"))}
    assert {str(path.relative_to(ROOT)): length for path, length in lengths.items() if length > FILE_LINES} == {}


def test_no_class_has_too_many_attributes() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {node.name}": len(attributes(node))
        for path in modules()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    }
    assert len(found) > 100
    assert {name: count for name, count in found.items() if count > ATTRIBUTES} == {}
