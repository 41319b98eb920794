"""The documents, docstrings and messages use plain words and short sentences."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

from tests.support.jobs import ROOT

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
SOURCES = sorted(path for top in ("mirrored", "towers") for path in (ROOT / top).rglob("*.py"))
AVOIDED = {
    r"\b(goes|go|going|went) on\b": "continues, resumes",
    r"\b(anew|in vain|first of all)\b": "again, without success, root cause",
    r"\bbeside\b": "alongside, in parallel with",
    r"\b(nobody|somebody)\b": "no tower, a caller, the process that",
    r"\b(says|said)\b": "reports, logs, raises",
    r"\b(is|are|was) told to\b": "receives SIGTERM",
    r"\b(has|have|had) come\b|\bcomes? back\b": "has joined, rejoins",
    r"\b(lies|lie) in\b": "is stored in",
    r"\b(shared?|sharing) out\b": "split, partition",
    r"\balike\b": "identically, on every tower",
    r"\bof (its|your|their|our) own\b(?! [a-z])|\bours\b": "its own X, custom, mirrored's",
    r"\bmend(s|ed)?\b": "fix",
    r"\bbut for\b|\balso where\b": "except, even if",
    r"(?<!there )\b(is|are) no (?!longer|more|less|such|different|other)": "is not a",
    r"\b(began|begun)\b": "started",
    r"\blifelines?\b": "keepalive connection",
    r"\bmakes a (call|collective|backward|run)\b": "calls, runs",
}
"""Regular expressions of words, and the words that replace them."""

LONGEST = 35


def prose_of(text: str) -> str:
    """A page without code, comments, addresses and titles of notes."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"<!--.*?-->|\[Note:[^]]*\]|`[^`]*`|\]\([^)]*\)", " x ", text, flags=re.DOTALL)


def sentences_of(text: str) -> Iterator[str]:
    """The sentences of paragraphs and lists, not those of tables and headings."""
    lines = [line for line in prose_of(text).splitlines() if not re.match(r"\s*(\||#|:::|>|\[)", line)]
    for part in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) ", "\n".join(lines)):
        yield from re.split(r"(?<=[.!?:;])\s+", " ".join(part.split()))


def docstrings_of(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """The docstrings of a module, with their lines, without code, names of arguments, and titles of notes."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            code = r"\[Note:[^]]*\]|(?::\w+:)?`+[^`]*`+|^ +[\w, ]+:"
            yield node.lineno, " ".join(re.sub(code, " x ", node.value.value, flags=re.MULTILINE).split())


def messages_of(path: pathlib.Path) -> Iterator[tuple[int, str]]:
    """The texts of a module that are not docstrings, with their lines. Values in them are left out."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
    parts = {id(value) for node in nodes if isinstance(node, ast.JoinedStr) for value in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(v.value if isinstance(v, ast.Constant) else "…" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings | parts:
            yield node.lineno, node.value


def avoided_in(text: str) -> list[str]:
    return [
        f"{match[0]!r} (write: {instead}) in {text[max(0, match.start() - 40) : match.end() + 20]!r}"
        for words, instead in AVOIDED.items()
        for match in re.finditer(words, text, re.IGNORECASE)
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_plain_words_and_short_sentences(page: pathlib.Path) -> None:
    text = page.read_text()
    found = avoided_in(" ".join(prose_of(text).split()))
    found += [sentence for sentence in sentences_of(text) if len(re.findall(r"[a-z]{2,}|\ba\b", sentence)) > LONGEST]
    assert not found, "\n".join(found)


def test_docstrings_and_messages_have_plain_words() -> None:
    found = []
    for path in SOURCES:
        for line, text in [*docstrings_of(path), *messages_of(path)]:
            if len(text.split()) >= 3:
                found += [f"{path.relative_to(ROOT)}:{line}: {each}" for each in avoided_in(text)]
    assert not found, "\n".join(found)


OF_TORCH = ("Gloo connectFullMesh", "Unable to find address", "DataLoader worker", "Expected all", "NCCL error", "[W")
"""Beginnings of messages of torch that docs/how-to/troubleshooting.md quotes."""


def test_messages_that_troubleshooting_quotes_exist() -> None:
    messages = "\n".join(" ".join(text.split()) for path in SOURCES for _, text in messages_of(path))
    quotes = re.findall(r"^\| `([^`]+)`", (ROOT / "docs/how-to/troubleshooting.md").read_text(), re.MULTILINE)
    assert len(quotes) > 30
    for quote in quotes:
        text = re.sub(r"^\w+Error: ", "", quote)
        values = r"…|the chief \(worker 0\)|MirroredStrategy|nan|\b[A-Z]+\b(?::[A-Z]+)?|\d+"
        parts = [part.strip(" ,;:()") for part in re.split(values, text)]
        if not text.startswith(OF_TORCH):
            assert all(part in messages for part in parts if len(part.split()) > 2), quote
