"""How large the house may be: lines of code, of a file, and attributes of a class. The walls are import-linter's."""

from __future__ import annotations

import ast
import io
import pathlib
import tokenize
from collections.abc import Iterator

import grimp

from tests.support.jobs import ROOT

PRODUCT, CORE = 19_250, 7_960
"""Lines of code that all of ``mirrored`` and ``towers`` may have, and what every run needs of it."""

FILE_LINES = 400
ATTRIBUTES = 18

CORE_OF = {
    "mirrored": {
        *("__init__", "__main__", "cli", "cluster", "context", "data", "foreign_names", "generators", "losses"),
        *("observer", "operations", "seeds", "stand_in", "strategy"),
    },
    "towers": {
        *("__init__", "__main__", "collectives", "errors", "gradients", "health", "joining", "launching", "mirroring"),
        *("options", "system", "topology"),
    },
}
ANNEXES_WITHIN = {
    "mirrored/cluster/slurm.py",
    "mirrored/data/batch_dims.py",
    "mirrored/data/streams.py",
    "mirrored/strategy/backward.py",
    "mirrored/strategy/keras_guard.py",
    "mirrored/strategy/own_gradients.py",
    "towers/collectives/shared_memory",
    "towers/collectives/hierarchical.py",
    "towers/collectives/host_staged.py",
    "towers/collectives/labelled.py",
    "towers/gradients/averages.py",
    "towers/gradients/lazy.py",
    "towers/gradients/nonfinite.py",
    "towers/gradients/reduce_scatter.py",
    "towers/gradients/tree_sum.py",
    "towers/launching/launch.py",
    "towers/launching/play_cluster.py",
    "towers/mirroring/equality.py",
    "towers/mirroring/extremes.py",
    "towers/mirroring/fingerprint.py",
}
"""Annexes in the core's folders: nothing needs them that does not ask for them."""

ASSEMBLERS = {
    *("mirrored", "mirrored.cli", "towers"),  # what users call
    *("mirrored.strategy.base", "mirrored.strategy.engine"),
    *("mirrored.cluster", "mirrored.data.distribute", "towers.collectives.connecting"),  # one of several kinds
}
"""The modules of the core that may import annexes."""

_NO_CODE = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def modules(folders: tuple[str, ...] = ("mirrored", "towers")) -> Iterator[pathlib.Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def lines_of_code(path: pathlib.Path) -> int:
    """Lines with code on them: no blank ones, comments or docstrings."""
    text = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NO_CODE:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - docstrings)


def is_core(path: pathlib.Path) -> bool:
    package, first, *_ = path.relative_to(ROOT).with_suffix("").parts
    name = path.relative_to(ROOT).as_posix()
    return first in CORE_OF[package] and not name.startswith(tuple(ANNEXES_WITHIN))


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
    counts = {path: lines_of_code(path) for path in modules()}
    total, core = sum(counts.values()), sum(count for path, count in counts.items() if is_core(path))
    print(f"{total} lines of code, {core} of them in the core")
    assert total <= PRODUCT
    assert core <= CORE


def test_the_core_imports_annexes_in_its_assemblers_only() -> None:
    graph = grimp.build_graph("mirrored", "towers", cache_dir=None)
    assert len(graph.modules) == len(list(modules()))
    in_core = {name: is_core(_path_of(name)) for name in graph.modules}
    importers = {
        name: {other for other in graph.find_modules_directly_imported_by(name) if not in_core[other]}
        for name in graph.modules
        if in_core[name]
    }
    assert {name: others for name, others in importers.items() if others and name not in ASSEMBLERS} == {}
    assert all(importers[name] for name in ASSEMBLERS)


def _path_of(module: str) -> pathlib.Path:
    path = ROOT / module.replace(".", "/")
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


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


def test_core_and_annexes_are_there() -> None:
    for package, names in CORE_OF.items():
        for name in names:
            assert (ROOT / package / name).is_dir() or (ROOT / package / f"{name}.py").is_file(), f"{package}/{name}"
    for name in ANNEXES_WITHIN:
        assert (ROOT / name).exists(), name
