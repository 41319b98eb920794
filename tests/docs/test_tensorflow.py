"""What the tables for those who come from TensorFlow say is here, is here, and what is not here has a reason."""

from __future__ import annotations

import inspect
import pkgutil
import re
from typing import Any

import pytest
from tensorflow_names import PAGE, rows

import mirrored
from tests.support.jobs import ROOT

HERE = [here for page in (ROOT / "docs/migrate/tensorflow.md", PAGE) for _, here, _ in rows(page.read_text())]
"""The middle cells of the tables."""

OBJECTS = {"strategy": "mirrored.Strategy", "manager": "mirrored.CheckpointManager", "nn": "torch.nn"}
"""What stands for an object in the tables."""

_NAME = re.compile(r"(?<![\w.])(mirrored|torch|strategy|manager|nn)((?:\.(?!keras)\w+)+)(?:\(((?:[^()]|\(\))*)\))?")
"""A name and its arguments. Keras takes seconds to import, and has tests of its own."""


def found(name: str) -> Any:
    """What a name stands for; of attributes that only objects have, their class's annotation or the assignment."""
    owner, _, attribute = name.rpartition(".")
    try:
        return pkgutil.resolve_name(name)
    except AttributeError:
        bases = inspect.getmro(pkgutil.resolve_name(owner))[:-1]
        assigned = [base for base in bases if re.search(rf"self\.{attribute}\b.* = ", inspect.getsource(base))]
        assert assigned or any(attribute in inspect.get_annotations(base) for base in bases), f"{name} is not here"
        return None


def keywords(function: Any) -> set[str]:
    """The names of a function's arguments; a class that passes on what it is given has its bases', too."""
    owners = inspect.getmro(function)[:-1] if inspect.isclass(function) else (function,)
    return {name for owner in owners for name in inspect.signature(owner).parameters}


def test_what_a_line_names_exists() -> None:
    code = "\n".join(code for here in HERE for code in re.findall(r"`[^`]+`", here))
    names = _NAME.findall(code)
    assert len(names) > 100
    for first, rest, arguments in names:
        thing = found(OBJECTS.get(first, first) + rest)
        named = set(re.findall(r"(?:^|, )(\w+)=", arguments))
        assert not named or named <= keywords(thing), f"{first}{rest}({arguments})"


def test_a_name_that_is_not_here_is_not_found() -> None:
    for name in ("mirrored.Scope", "mirrored.Strategy.extended", "mirrored.Strategy.rank", "torch.distribute"):
        with pytest.raises((AssertionError, ImportError, AttributeError)):
            found(name)
    assert found("mirrored.Strategy.num_replicas_in_sync") is None
    assert "communication" in keywords(mirrored.MultiWorkerMirroredStrategy)


def test_every_line_says_what_is_here_or_why_not() -> None:
    page = rows(PAGE.read_text())
    assert len(page) > 80
    for names, here, note in page:
        assert ("`" in here) != bool(re.fullmatch("not here(?: yet)?", here) and note), names
