"""Which public names of tf.distribute have no line in docs/reference/tensorflow-names.md, and which lines name nothing.

Public names are modules, functions and classes, and a class's methods, properties, fields and constants. What a class
inherits from a public class is named once, as that class's, and what a class with several names has, under one of them.
Exits with 1 when a name has no line, or a line names nothing.
"""

from __future__ import annotations

import argparse
import inspect
import os
import pathlib
import re
import sys
import types
from collections.abc import Iterator
from typing import Any

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs/reference/tensorflow-names.md"


def rows(page: str) -> list[tuple[list[str], str, str]]:
    """The lines of a page's tables: names of TensorFlow, what is here in their place, and a note, if any."""
    lines = re.findall(r"^\| (`[^|]*?) \| ([^|]*?)(?: \| ([^|]*?))? ?\|$", page, re.MULTILINE)
    return [(re.findall(r"`([^`]+)`", names), here, note) for names, here, note in lines]


def public(thing: Any) -> set[str]:
    """Names without an underscore in front; ``dir`` of an enumeration leaves out its methods."""
    names = set(dir(thing)).union(*map(vars, getattr(thing, "__mro__", ())))
    return {name for name in names if not name.startswith("_")}


def exported(module: types.ModuleType, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Modules, functions and classes with the names under which a module exports them."""
    for name in public(module):
        thing = getattr(module, name)
        yield prefix + name, thing
        if isinstance(thing, types.ModuleType):
            yield from exported(thing, f"{prefix}{name}.")


def public_names(module: types.ModuleType) -> set[str]:
    named = dict(exported(module))
    classes: dict[type, str] = {}
    for name in sorted(named, key=lambda name: (name.count("."), not name.endswith(named[name].__name__), name)):
        if inspect.isclass(named[name]):
            classes.setdefault(named[name], name)
    names = set(named)
    for thing, name in classes.items():
        bases = [base for base in thing.__mro__[1:] if base in classes or base.__module__.split(".")[0] != "tensorflow"]
        names.update(f"{name}.{member}" for member in public(thing).difference(*map(public, bases)))
    return names


def main() -> int:
    argparse.ArgumentParser(
        prog="scripts/tensorflow_names", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    names = public_names(tf.distribute)
    listed = [name for line, _, _ in rows(PAGE.read_text()) for name in line]
    problems = {
        "has no line": names.difference(listed),
        "is no public name": set(listed) - names,
        "has two lines": {name for name in listed if listed.count(name) > 1},
    }
    for problem, found in problems.items():
        for name in sorted(found):
            print(f"tf.distribute.{name} {problem}")
    lines = len(names.intersection(listed))
    print(f"tf.distribute of TensorFlow {tf.__version__} has {len(names)} public names; {lines} have a line")
    return int(any(problems.values()))


if __name__ == "__main__":
    sys.exit(main())
