"""The processes of this machine, as the kernel's tables show them."""

from __future__ import annotations

import contextlib
import pathlib

from tests.support.waiting import wait_until

PROC = pathlib.Path("/proc")


def family(process: int) -> list[int]:
    """A process and all processes that it or its children have started."""
    found = [process]
    for path in PROC.glob(f"{process}/task/*/children"):
        with contextlib.suppress(OSError):
            for child in path.read_text().split():
                found += family(int(child))
    return found


def state_of(process: int) -> str:
    """R (runs), S (sleeps), T (stopped), Z (has ended, its exit code has not been read), …; empty: it is gone."""
    with contextlib.suppress(OSError):
        return (PROC / str(process) / "stat").read_text().rpartition(")")[2].split()[0]
    return ""


def has_ended(process: int) -> bool:
    """Whether it has ended; its exit code may not have been read yet."""
    return state_of(process) in ("Z", "")


def await_ends(*processes: int) -> None:
    """Return when all of them have ended."""
    wait_until(lambda: all(map(has_ended, processes)))


def command_of(process: int) -> str:
    """Its command line, shortened."""
    with contextlib.suppress(OSError):
        return (PROC / str(process) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
    return ""


def wanted_seconds(process: int) -> float:
    """Seconds for which its threads have run on a core or have waited for one."""
    total = 0
    for path in PROC.glob(f"{process}/task/*/schedstat"):
        with contextlib.suppress(OSError):
            ran, waited, _ = path.read_text().split()
            total += int(ran) + int(waited)
    return total / 1e9


def catches(process: int, number: int) -> bool:
    """Whether it handles a signal."""
    with contextlib.suppress(OSError):
        for line in (PROC / str(process) / "status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False
