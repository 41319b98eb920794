"""Files that one of verify's runs writes and a later one reads, such as backups and caches.

Runs that read such files start differently, so they cannot be compared.

[Note: which files count] Python's audit events report every file that a run opens. A file belongs to an earlier run if
it was last written between the start of the first run and the start of this run, by any program. Opening a file to
append does not count as reading. Libraries that open files without Python (HDF5) are not reported. If they read
parameters, the difference is visible before step 1. Starting each run with a copy of the files would avoid the problem.
But the files to copy are unknown, and users would not learn that their script reads files that it has written.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence
from typing import Any

from mirrored.verification.report import Cause, Explanation, first_names

_OF_OTHERS = ("/proc/", "/sys/", "/dev/", os.path.expanduser("~/."))  # the last one: caches and settings of libraries


def watch(notes: str, first: float, begun: float) -> None:
    """Starts to note the files of earlier runs that this process and its forked children read.

    Args:
        notes: the file to which their paths are appended, one per line.
        first: the start of the first run, in seconds since the epoch, by the clock of files.
        begun: the start of this run.
    """
    appended: set[str] = set()

    def note(event: str, args: tuple[Any, ...]) -> None:
        if event not in ("open", "sqlite3.connect"):
            return
        flags = args[2] if event == "open" else os.O_RDWR
        try:
            path = os.path.abspath(os.fsdecode(args[0]))
            status = os.stat(path)
        except (OSError, TypeError, ValueError):  # a new file, a descriptor, or an invalid name
            return
        if not stat.S_ISREG(status.st_mode) or path.startswith(_OF_OTHERS) or path.endswith(".pyc"):
            return
        if not first < status.st_mtime <= begun and path not in appended:
            return
        if flags & os.O_TRUNC:
            appended.discard(path)
        elif flags & os.O_ACCMODE == os.O_WRONLY:
            appended.add(path)
        else:
            with open(notes, "a", encoding="utf-8", errors="surrogateescape") as file:
                file.write(f"{path}\n")

    sys.addaudithook(note)


def not_comparable(files: Sequence[str]) -> Explanation:
    """Explains that the runs have read these files of earlier runs."""
    return Explanation(
        Cause.NOT_COMPARABLE,
        "this script cannot be compared: a run of verify read files that an earlier one had left, so the runs "
        f"did not start from the same state: {first_names(files)}",
        "exclude the code that writes or reads them (a backup, a checkpoint, a cache), for example with an "
        "argument of the script, or let the script start with new files",
        "the times at which the files were written",
    )
