"""Files that one of verify's runs leaves and a later one reads, such as backups and caches: those do not start alike.

[Note: which files count] Python's audit events tell of every file that a run opens. One that was last written between
the beginning of the first run and that of this one is of an earlier run, whatever wrote it. Opening it to append reads
nothing yet. Libraries that open files without Python (HDF5) tell nothing; parameters that they read show before step 1.
Starting each run from a copy of the files would avoid the question; but which files to copy is not known, and it would
hide from users that their script reads what it has written.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Sequence
from typing import Any

from mirrored.verification.report import Cause, Explanation, first_names

_OF_OTHERS = ("/proc/", "/sys/", "/dev/", os.path.expanduser("~/."))  # the last: caches and settings of libraries


def watch(notes: str, first: float, begun: float) -> None:
    """Note the files of earlier runs that this process and its forked children read from now on.

    Args:
        notes: the file to append their paths to, one a line.
        first: when the first run began, in seconds since the epoch by the clock of files.
        begun: when this run began.
    """
    appended: set[str] = set()

    def note(event: str, args: tuple[Any, ...]) -> None:
        if event not in ("open", "sqlite3.connect"):
            return
        flags = args[2] if event == "open" else os.O_RDWR
        try:
            path = os.path.abspath(os.fsdecode(args[0]))
            status = os.stat(path)
        except (OSError, TypeError, ValueError):  # a new file, a descriptor, a name that no file has
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
    """The explanation where runs have read these files of earlier runs."""
    return Explanation(
        Cause.NOT_COMPARABLE,
        "this script cannot be compared: a run of verify read files that an earlier one had left, so the runs "
        f"did not start from the same state: {first_names(files)}",
        "exclude the code that writes or reads them (a backup, a checkpoint, a cache), for example with an "
        "argument of the script, or let the script start with new files",
        "the times at which the files were written",
    )
