"""What the benchmarks' command lines have in common."""

from __future__ import annotations

import argparse
from collections.abc import Collection

import models


def names(text: str) -> list[str]:
    """What an option lists between commas."""
    return text.split(",")


def parser(
    name: str,
    about: str | None,
    *,
    turns: int,
    seconds: float | None = None,
    towers: int | None = 2,
    cases: Collection[str] = (),
    chosen: str = "",
    implementation: bool = False,
) -> argparse.ArgumentParser:
    """The parser of ``scripts/bench NAME``.

    Args:
        about: the benchmark's docstring.
        turns, seconds, towers: defaults; without one there is no such option.
        cases: all that there are.
        chosen: those of a run without ``--cases``, if not all.
        implementation: whether collectives can be chosen.
    """
    made = argparse.ArgumentParser(
        prog=f"scripts/bench {name}", description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if cases:
        default = chosen or ",".join(case for case in cases if case not in models.ONLY_NAMED)
        made.add_argument("--cases", type=names, default=default, help="comma-separated: " + ", ".join(cases))
    if towers is not None:
        made.add_argument("--towers", type=int, default=towers)
    if implementation:
        made.add_argument("--implementation", default="auto", help="of our towers: auto, gloo, …")
    made.add_argument("--turns", type=int, default=turns, help="alternations")
    if seconds is not None:
        made.add_argument("--seconds", type=float, default=seconds, help="length of one variant's turn")
    return made


def cpus(count: int) -> list[str]:
    """The devices of so many CPU towers."""
    return [f"cpu:{i}" for i in range(count)]
