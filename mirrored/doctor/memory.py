"""Memory: what is free, and the file system that data loaders share it by."""

from __future__ import annotations

import os
import pathlib
import re
from collections.abc import Iterator, Mapping

from mirrored.doctor import cgroup
from mirrored.doctor.finding import Finding, ok, problem, warning

_GB = 2**30
_TOWER = 0.5 * _GB  # what an idle tower takes: Python and torch
_DEV_SHM = "/dev/shm"


def check(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Memory that processes can still take, of the machine and of the container."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB", pathlib.Path("/proc/meminfo").read_text(), re.MULTILINE)
    free = int(match[1]) * 1024 if match else None
    granted = cgroup.free_memory()
    known = [size for size in (free, granted) if size is not None]
    if not known:
        return
    left = min(known)
    whose = " in this container" if left == granted else ""
    what = f"{left / _GB:.1f} GB free{whose}"
    if left < 2 * _TOWER:
        yield problem("memory", f"{what}: not even two idle towers fit", "end other programs, or raise the limit")
    elif left < 8 * _TOWER:
        fix = "take few towers, end other programs, or raise the limit"
        yield warning("memory", f"{what}; a tower takes {_TOWER / _GB:.1f} GB before it has a model", fix)
    else:
        yield ok("memory", what)


def check_dev_shm(environ: Mapping[str, str]) -> Iterator[Finding]:
    """/dev/shm, which towers do not need but the workers of data loaders and NCCL do."""
    fix = "start the container with --shm-size=1g (docker) or a memory-backed emptyDir at /dev/shm (Kubernetes)"
    try:
        room = os.statvfs(_DEV_SHM)
    except OSError as error:
        yield warning(_DEV_SHM, f"is not there ({error.strerror}); num_workers of data loaders and NCCL need it", fix)
        return
    size, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    what = f"{_size(free)} of {_size(size)} free"
    if not os.access(_DEV_SHM, os.W_OK):
        yield warning(_DEV_SHM, "is not writable; num_workers of data loaders and NCCL need it", "chmod 1777 /dev/shm")
    elif free < _GB / 4:
        yield warning(
            _DEV_SHM,
            f"{what}; towers do not need it, but data loaders with num_workers > 0 do (they die with a bus error when "
            "it is full), and so does NCCL",
            fix,
        )
    else:
        yield ok(_DEV_SHM, f"{what} (for data loaders' workers and NCCL; towers do not need it)")


def _size(nbytes: int) -> str:
    return f"{nbytes / _GB:.1f} GB" if nbytes >= _GB else f"{nbytes / 2**20:.0f} MB"
