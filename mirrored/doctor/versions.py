"""Are Python and the libraries those that this project was made for?"""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from collections.abc import Iterator, Mapping

from mirrored.doctor.finding import Finding, note, ok, problem, warning

_PACKAGE = "mirrored"


def check(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Python, torch, numpy and safetensors against the ranges that the installed package declares."""
    try:
        wanted = importlib.metadata.requires(_PACKAGE) or []
        python = str(importlib.metadata.metadata(_PACKAGE)["Requires-Python"] or "")
    except importlib.metadata.PackageNotFoundError:
        yield note(
            "versions",
            f"Python {platform.python_version()} at {sys.executable}; {_PACKAGE} is imported, but not installed, so "
            "the ranges that it needs are not known",
            "pip install it (pip install -e PATH_TO_THE_CLONE)",
        )
        return
    yield compare("Python", platform.python_version(), python, "use a Python in this range")
    for requirement in wanted:
        if ";" in requirement:  # an extra
            continue
        match = re.match(r"([\w.-]+)\s*(.*)", requirement)
        assert match is not None, requirement
        name, ranges = match.groups()
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield problem(name, "is not installed", f"pip install '{requirement}'")
            continue
        yield compare(name, found, ranges, f"pip install '{requirement}'")


def compare(name: str, found: str, ranges: str, fix: str) -> Finding:
    """Whether version ``found`` lies within ``ranges``, such as ``">=2.9,<2.14"``."""
    for bound in filter(None, (part.strip() for part in ranges.split(","))):
        match = re.fullmatch(r"(>=|<)\s*([\d.]+)", bound)
        if match is None:
            return warning(name, f"{found}; the bound {bound!r} cannot be read here", "see pyproject.toml")
        operator, limit = match.groups()
        if (_numbers(found) >= _numbers(limit)) != (operator == ">="):
            return problem(name, f"{found} is outside of {ranges}", fix)
    return ok(name, f"{found} ({ranges})")


def _numbers(version: str) -> tuple[int, ...]:
    """``"2.13.0a0+cu126"`` as (2, 13): zeros at the end do not count."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
