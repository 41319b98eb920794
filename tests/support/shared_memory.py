"""What lies in /dev/shm, and in files that have no name."""

from __future__ import annotations

import contextlib
import os
import pathlib
import time
from collections.abc import Collection

from tests.support.waiting import HANG


def names() -> set[str]:
    """All names there, but for the semaphores of other programs that come and go."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")}


def left(before: set[str]) -> list[str]:
    """The names that were not there ``before`` and stay. What other data loaders pass on has one for a moment."""
    new = names() - before
    deadline = time.monotonic() + HANG
    while new and time.monotonic() < deadline:
        time.sleep(0.05)
        new &= names()
    return sorted(new)


def files_of(process: int | str, name: str = "") -> list[os.stat_result]:
    """What a process has open, of files that ``memfd_create`` made under names that begin so."""
    files = []
    with contextlib.suppress(OSError):  # it ends, or is another user's
        for path in pathlib.Path(f"/proc/{process}/fd").iterdir():
            with contextlib.suppress(OSError):
                if os.readlink(path).startswith(f"/memfd:{name}"):
                    files.append(path.stat())
    return files


def holders(files: Collection[os.stat_result]) -> list[str]:
    """The processes that have one of these files open."""
    wanted = {(file.st_dev, file.st_ino) for file in files}
    processes = [path.name for path in pathlib.Path("/proc").iterdir() if path.name.isdigit()]
    return [each for each in processes if any((file.st_dev, file.st_ino) in wanted for file in files_of(each))]
