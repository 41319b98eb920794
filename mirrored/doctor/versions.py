"""Checks the versions of Python and the libraries against the ranges that the installed package declares."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import sys
from collections.abc import Iterator, Mapping

from mirrored.doctor.findings import Finding, note, ok, problem, warning

_PACKAGE = "mirrored"


def check(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks Python, torch, numpy and safetensors."""
    try:
        required = importlib.metadata.requires(_PACKAGE) or []
        python = str(importlib.metadata.metadata(_PACKAGE)["Requires-Python"] or "")
    except importlib.metadata.PackageNotFoundError:
        yield note(
            "versions",
            f"Python {platform.python_version()} at {sys.executable}; {_PACKAGE} is imported, but not installed, so "
            "the ranges that it needs are unknown",
            "pip install it (pip install -e PATH_TO_THE_CLONE)",
        )
        return
    yield compare("Python", platform.python_version(), python, "use a Python in this range")
    for requirement in required:
        if ";" in requirement:  # an extra
            continue
        match = re.match(r"([\w.-]+)\s*(.*)", requirement)
        assert match is not None, requirement
        name, ranges = match.groups()
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield problem(name, "is not installed", f"pip install '{requirement}'")
            continue
        yield compare(name, installed, ranges, f"pip install '{requirement}'")


def compare(name: str, version: str, ranges: str, fix: str) -> Finding:
    """Checks whether ``version`` is in ``ranges``, such as ``">=2.9,<2.14"``."""
    for bound in filter(None, map(str.strip, ranges.split(","))):
        match = re.fullmatch(r"(>=|<)\s*([\d.]+)", bound)
        if match is None:
            return warning(name, f"{version}; the bound {bound!r} cannot be read here", "see pyproject.toml")
        operator, limit = match.groups()
        if (_numbers(version) >= _numbers(limit)) != (operator == ">="):
            return problem(name, f"{version} is outside of {ranges}", fix)
    return ok(name, f"{version} ({ranges})")


def _numbers(version: str) -> tuple[int, ...]:
    """Returns ``"2.13.0a0+cu126"`` as (2, 13), without zeros at the end."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(number) for number in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
