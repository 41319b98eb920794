"""Compares what ``strategy.reduce`` and ``strategy.gather`` return on one tower and on N."""

from __future__ import annotations

import math
from collections import defaultdict

from mirrored.verification.compare import Comparison, relative, usual_tolerance
from mirrored.verification.trace import Result, Seen

_Line = tuple[str, int | None]


def differing(comparison: Comparison, again: Seen | None = None) -> tuple[Result, Result] | None:
    """The first result that differs: (on one tower, on N).

    Differences are relative to the largest value that this line of the script has got at this place. Integers know no
    rounding, and a value of fewer digits than the parameters have is compared as far as it goes. A gather that returns
    N times as many entries as on one tower tells one from each tower, as it should.

    Args:
        again: what a further run on one tower has seen; lines whose results differ there (times, for example) do not
            count.
    """
    one, many = comparison.one.results, comparison.many[0].results
    sizes: defaultdict[tuple[_Line, int], float] = defaultdict(float)
    for result in one:
        for i, value in enumerate(result.values):
            sizes[_line(result), i] = max(sizes[_line(result), i], abs(value))

    def amounts(a: Result, b: Result) -> list[float]:
        return [
            min(relative(x, y), _part(abs(x - y), sizes[_line(a), i]))
            for i, (x, y) in enumerate(zip(a.values, b.values, strict=False))
        ]

    unsteady: set[_Line] = set()
    for alone, repeated in zip(one, again.results if again is not None else [], strict=False):
        if alone.count != repeated.count or any(amount > comparison.tolerance for amount in amounts(alone, repeated)):
            unsteady.add(_line(alone))
    moved = comparison.unrest.results if comparison.unrest is not None else []
    rounding: defaultdict[_Line, float] = defaultdict(float)
    for at, (alone, together) in enumerate(zip(one, many, strict=False)):
        line = _line(alone)
        if line[0].split("(")[0] != together.call.split("(")[0] or alone.steps != together.steps:
            return None
        if at < len(moved):
            rounding[line] = max(rounding[line], *amounts(alone, moved[at]), 0.0)
        if line in unsteady:
            continue
        if alone.count != together.count:
            if line[0].startswith("gather") and together.count == len(comparison.many) * alone.count:
                continue
            return alone, together
        for i, amount in enumerate(amounts(alone, together)):
            least = _least(comparison, alone.dtypes[i])
            if amount > (least if comparison.exact else max(least, comparison.margin * rounding[line])):
                return alone, together
    return None


def _least(comparison: Comparison, dtype: str) -> float:
    if comparison.exact or dtype.startswith(("int", "uint", "bool")):
        return 0.0
    finer = comparison.parameters_tolerance < usual_tolerance(dtype)
    return max(comparison.tolerance, usual_tolerance(dtype)) if finer else comparison.tolerance


def _line(result: Result) -> _Line:
    return result.call, result.line


def _part(difference: float, size: float) -> float:
    return difference / size if size and math.isfinite(difference) else math.inf
