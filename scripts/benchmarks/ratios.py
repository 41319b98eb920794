"""Ratios of what was measured in turns: each turn compares neighbours in time, and the turns give a spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Ratio:
    """Median and quartiles over the turns."""

    value: float
    low: float
    high: float


def compare(ones: Sequence[float], others: Sequence[float]) -> Ratio:
    """The ratio of two variants."""
    ratios = [one / other for one, other in zip(ones, others, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    return Ratio(statistics.median(ratios), low, high)
