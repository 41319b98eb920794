"""A benchmark's table as a picture: ratios as bars, their quartiles as whiskers, and a line where both are equal."""

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratios import Ratio

_GROUPS = 8


@dataclass(frozen=True)
class Bar:
    """One ratio.

    Attributes:
        group: what it was measured on; bars of one group stand together.
        name: what is compared; one colour each.
    """

    group: str
    name: str
    ratio: Ratio


def add_option(parser: argparse.ArgumentParser) -> None:
    """``--png PATH``, the same for all benchmarks."""
    parser.add_argument("--png", type=Path, metavar="PATH", help="also draw the ratios into this file")


def draw(path: Path | None, title: str, bars: Sequence[Bar], *, axis: str = "ratio of times") -> None:
    """Draw the bars into a small PNG, at most eight groups in a row; nothing where there is no path or no bar."""
    if path is None or not bars:
        return
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image  # matplotlib brings it

    groups, names = list(dict.fromkeys(b.group for b in bars)), list(dict.fromkeys(b.name for b in bars))
    rows = [groups[start : start + _GROUPS] for start in range(0, len(groups), _GROUPS)]
    wide = max(5.0, 1.2 + 0.45 * len(rows[0]) * (1 + len(names)))
    picture, grid = pyplot.subplots(len(rows), 1, figsize=(wide, 0.6 + 3.0 * len(rows)), sharey=True, squeeze=False)
    for axes, row in zip(grid[:, 0], rows, strict=True):
        _draw_row(axes, row, names, bars)
        axes.set_ylabel(axis)
    grid[0, 0].set_title(title, fontsize=10)
    grid[0, 0].legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    drawn = io.BytesIO()
    picture.savefig(drawn, dpi=100, bbox_inches="tight")
    pyplot.close(picture)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.open(drawn).convert("RGB").quantize(64).save(path, format="PNG", optimize=True)
    print(f"drawn into {path}")


def _draw_row(axes: Any, groups: Sequence[str], names: Sequence[str], bars: Sequence[Bar]) -> None:
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        mine = [b for b in bars if b.name == name and b.group in groups]
        at = [groups.index(b.group) + (number - (len(names) - 1) / 2) * width for b in mine]
        found = [b.ratio for b in mine]
        whiskers = [[max(0.0, r.value - r.low) for r in found], [max(0.0, r.high - r.value) for r in found]]
        drawn = axes.bar(at, [r.value for r in found], width * 0.92, yerr=whiskers, capsize=2, label=name)
        axes.bar_label(drawn, fmt="%.2f", fontsize=7, padding=2)
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.set_xticks(range(len(groups)), groups, fontsize=8)
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)
