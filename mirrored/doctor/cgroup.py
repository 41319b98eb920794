"""What the container or the service manager grants this process, beside what the machine has (Linux cgroups)."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator

_ROOT = pathlib.Path("/sys/fs/cgroup")
_MEMBERSHIP = pathlib.Path("/proc/self/cgroup")


def cpus() -> float | None:
    """The CPUs' worth of time that this process and those beside it in its group may take; None: no limit."""
    limits = []
    for folder in _folders("cpu"):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            limits.append(int(quota) / int(period))
        with contextlib.suppress(OSError, ValueError):
            allowed = int((folder / "cpu.cfs_quota_us").read_text())
            if allowed > 0:
                limits.append(allowed / int((folder / "cpu.cfs_period_us").read_text()))
    return min(limits, default=None)


def free_memory() -> int | None:
    """The bytes that the group may still take; None: no limit."""
    rooms = []
    for folder in _folders("memory"):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with contextlib.suppress(OSError, ValueError):
                allowed = int((folder / limit).read_text())
                if allowed < 2**60:  # the first version writes "no limit" as a huge number
                    taken = int((folder / used).read_text()) - _reclaimable(folder)
                    rooms.append(max(0, allowed - max(0, taken)))
    return min(rooms, default=None)


def _reclaimable(folder: pathlib.Path) -> int:
    """Bytes of cached files that the kernel gives up first."""
    for line in (folder / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return int(value)
    return 0


def _folders(controller: str) -> Iterator[pathlib.Path]:
    """Where the limits lie: this process's group and all groups around it, of both versions of cgroups."""
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = _ROOT
        elif controller in controllers.split(","):
            root = _ROOT / controller
        else:
            continue
        group = root / path.strip("/")
        while group != root:
            yield group  # in a container the path may be the host's, and not be there
            group = group.parent
        yield root
