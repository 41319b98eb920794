"""The processes that others have started."""

from __future__ import annotations

import pathlib


def descendants(pid: int) -> dict[int, str]:
    """The processes that a process has started, and those that they have, with their command lines."""
    parents: dict[int, int] = {}
    commands: dict[int, str] = {}
    for folder in pathlib.Path("/proc").iterdir():
        try:
            number = int(folder.name)
            parents[number] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            commands[number] = (folder / "cmdline").read_text().replace("\0", " ").strip()
        except (ValueError, OSError):
            continue
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return {number: commands[number] for number in found - {pid}}
