"""The scripts of the README, and what it shows of their output."""

from __future__ import annotations

import re

from tests.support.jobs import ROOT


def blocks_of_readme() -> list[str]:
    """The blocks of code from the diff on."""
    section = (ROOT / "README.md").read_text().partition("## From one device")[2]
    return re.findall(r"^```(?:diff)?\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)


def scripts_of_readme() -> dict[str, str]:
    """One device's script, the same with the changes of the diff, and this one with a mistake."""
    lines = blocks_of_readme()[0].splitlines(keepends=True)
    scripts = {
        "before": "".join(line[1:] for line in lines if line[0] != "+"),
        "train": "".join(line[1:] for line in lines if line[0] != "-"),
    }
    loss = next(line[1:] for line in lines if line.startswith("-    loss = "))
    scripts["wrong"] = re.sub(r"    loss = mirrored\..*\n", loss, scripts["train"])
    return scripts
