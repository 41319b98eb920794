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


def named(page: str) -> set[str]:
    """The modules that a part of the page names, by path or as names that follow a folder."""
    modules, folder = set(), ""
    for word in re.findall(r"`([^`]+)`", page):
        folder = word if word.endswith("/") else folder
        if word.endswith(".py"):
            modules.add(word if "/" in word else folder + word)
    return modules


def test_conditions_on_a_kind_of_device_are_in_the_modules_that_the_page_names() -> None:
    page = (ROOT / "docs" / "project" / "architecture.md").read_text()
    [part] = re.findall(r"These modules are for one kind of device:\n(.*?)\n## ", page, re.DOTALL)
    found = {
        str(path.relative_to(ROOT))
        for package in ("mirrored", "towers")
        for path in (ROOT / package).rglob("*.py")
        if depends_on_kind(ast.parse(path.read_text()))
    }
    assert len(found) > 10
    assert found <= named(part)
    assert all((ROOT / module).exists() for module in named(part))
