"""A benchmark's table as a picture: ratios as bars, their quartiles as whiskers, and a line where both are equal."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from steps import Ratio


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


def draw(path: Path, title: str, bars: Sequence[Bar]) -> None:
    """Draw the bars into a small PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from PIL import Image  # matplotlib brings it

    groups, names = list(dict.fromkeys(b.group for b in bars)), list(dict.fromkeys(b.name for b in bars))
    picture, axes = pyplot.subplots(figsize=(max(5.0, 1.2 + 0.45 * len(groups) * (1 + len(names))), 3.6))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        own = [b for b in bars if b.name == name]
        at = [groups.index(b.group) + (number - (len(names) - 1) / 2) * width for b in own]
        ratios = [b.ratio for b in own]
        whiskers = [[max(0.0, r.value - r.low) for r in ratios], [max(0.0, r.high - r.value) for r in ratios]]
        drawn = axes.bar(at, [r.value for r in ratios], width * 0.92, yerr=whiskers, capsize=2, label=name)
        axes.bar_label(drawn, fmt="%.2f", fontsize=7, padding=2)
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle="--")
    axes.set_xlim(-0.6, len(groups) - 0.4)
    axes.set_xticks(range(len(groups)), groups, fontsize=8)
    axes.margins(y=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_ylabel("ratio of times")
    axes.set_title(title, fontsize=10)
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    file = io.BytesIO()
    picture.savefig(file, dpi=100, bbox_inches="tight")
    pyplot.close(picture)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.open(file).convert("RGB").quantize(64).save(path, format="PNG", optimize=True)
    print(f"drawn into {path}")
