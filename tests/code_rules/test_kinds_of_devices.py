"""Code for one kind of device, which the simulated accelerator does not run, is where the architecture page says."""

from __future__ import annotations

import ast
import re

from tests.support.jobs import ROOT

KINDS = {"cuda", "nccl", "tpu", "xpu"}


def depends_on_kind(tree: ast.AST) -> bool:
    for node in ast.walk(tree):
        compares = isinstance(node, ast.Compare)
        if compares and any(isinstance(part, ast.Constant) and part.value in KINDS for part in ast.walk(node)):
            return True
        if isinstance(node, ast.Attribute) and (node.attr == "is_cuda" or ast.unparse(node) == "torch.cuda"):
            return True
    return False


def conditional_functions(tree: ast.AST) -> set[str]:
    """The innermost functions with a condition on the kind; "" for one outside of functions."""
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and depends_on_kind(n)]
    inner = {f.name for f in functions if not any(g is not f and g in list(ast.walk(f)) for g in functions)}
    return inner or ({""} if depends_on_kind(tree) else set())


def modules_of(page: str) -> set[str]:
    """The modules that a part of the page names."""
    return {word for word in re.findall(r"`([^`]+)`", page) if word.endswith(".py")}


def functions_of(page: str) -> dict[str, set[str]]:
    """The functions that a part of the page names in brackets, by module; each item starts with a folder."""
    found: dict[str, set[str]] = {}
    for folder, names in re.findall(r"- `(\w+/)`: (.*?)(?=\n- |\Z)", page, re.DOTALL):
        for module, functions in re.findall(r"`([\w/]+\.py)`\s+\(([^)]+)\)", names):
            found[folder + module] = set(re.findall(r"`(\w+)`", functions))
    return found


def test_conditions_on_a_kind_of_device_are_in_the_functions_that_the_page_names() -> None:
    page = (ROOT / "docs" / "project" / "architecture.md").read_text()
    pattern = r"These modules are for one kind of\sdevice:\n(.*?)\nThe rest is in these functions:\n(.*?)\n## "
    [(whole, rest)] = re.findall(pattern, page, re.DOTALL)
    modules = modules_of(whole)
    assert all((ROOT / module).exists() for module in modules)
    found = {
        str(path.relative_to(ROOT)): functions
        for package in ("mirrored", "towers")
        for path in (ROOT / package).rglob("*.py")
        if (functions := conditional_functions(ast.parse(path.read_text())))
    }
    assert len(found) > 10
    assert functions_of(rest) == {module: names for module, names in found.items() if module not in modules}
