"""Checks this machine and the container: CPU cores, memory, disk, limits, shared memory, versions of libraries."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import pathlib
import platform
import re
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping

from mirrored.doctor.findings import Finding, Severity, note, ok, problem, warning
from towers.system import machine

_PACKAGE = "mirrored"

_MB, _GB = 2**20, 2**30
_TOWER = 0.5 * _GB  # memory of an idle tower: Python and torch
_DEV_SHM = "/dev/shm"
_LONGEST = 60  # characters; Python's fork server adds about 40, and the kernel allows 107 in a socket's address
_FILES = 1024
_INFINIBAND = pathlib.Path("/sys/class/infiniband")
_CGROUPS = pathlib.Path("/sys/fs/cgroup")
_MEMBERSHIP = pathlib.Path("/proc/self/cgroup")


def check_cores(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks cores, a container's CPU limit and OMP_NUM_THREADS."""
    usable, limit = machine.cores(), _cpu_limit()
    present = os.cpu_count() or usable
    some = f" of {present}" if usable < present else ""
    what = f"{usable}{some} core{'s' if usable > 1 else ''}; two CPU towers take {machine.threads_per_tower(2)} each"
    stated = environ.get("OMP_NUM_THREADS", "")
    if limit is not None and limit < usable * 0.9:
        what += f", but the container's limit is {limit:.3g} CPUs"
        if stated.isascii() and stated.isdigit():
            yield note("CPU", what)
        else:
            yield warning(
                "CPU",
                f"{what}: with more threads than that, the kernel throttles them",
                f"set OMP_NUM_THREADS to the limit divided by the towers ({max(1, round(limit / 2))} for two), or "
                "raise the limit",
            )
    else:
        yield ok("CPU", what)
    if not stated:
        return
    subject = "OMP_NUM_THREADS"
    first = stated.split(",")[0].strip()
    if not re.fullmatch("[0-9]{1,9}", first) or int(first) == 0:
        yield problem(subject, f"is {stated!r}, which is not a number of threads", f"unset {subject}, or set a number")
    elif int(first) > usable:
        yield warning(
            subject,
            f"is {stated}, but this process has {usable} cores, which all its towers share",
            f"unset {subject}: towers then divide the cores among them",
        )
    else:
        idle = f"; a single tower on the CPU leaves {usable - int(first)} of {usable} cores idle"
        yield note(subject, f"is {stated} and wins over the towers' own choice{idle if int(first) < usable else ''}")


def _cpu_limit() -> float | None:
    """Returns the number of CPUs that the container allows for this process and its siblings; None for no limit."""
    limits = []
    for folder in _cgroups("cpu"):
        with contextlib.suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text().split()
            limits.append(int(quota) / int(period))
        with contextlib.suppress(OSError, ValueError):
            allowed = int((folder / "cpu.cfs_quota_us").read_text())
            if allowed > 0:
                limits.append(allowed / int((folder / "cpu.cfs_period_us").read_text()))
    return min(limits, default=None)


def _cgroups(controller: str) -> Iterator[pathlib.Path]:
    """Yields the directories with limits of this process's group and all its parents (cgroups, versions 1 and 2)."""
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = _CGROUPS
        elif controller in controllers.split(","):
            root = _CGROUPS / controller
        else:
            continue
        group = root / path.strip("/")  # in a container, the path may be the host's and not exist
        yield from (folder for folder in (group, *group.parents) if folder.is_relative_to(root))


def check_memory(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks the free memory of the machine and of the container."""
    available = _read_line(pathlib.Path("/proc/meminfo"), "MemAvailable:")
    granted = _free_memory_of_container()
    known = [size for size in (available and available * 1024, granted) if size is not None]
    if not known:
        return
    free = min(known)
    what = f"{free / _GB:.1f} GB free{' in this container' if free == granted else ''}"
    if free < 2 * _TOWER:
        yield problem("memory", f"{what}: not even two idle towers fit", "end other programs, or raise the limit")
    elif free < 8 * _TOWER:
        fix = "take few towers, end other programs, or raise the limit"
        yield warning("memory", f"{what}; a tower takes {_TOWER / _GB:.1f} GB before it has a model", fix)
    else:
        yield ok("memory", what)


def _free_memory_of_container() -> int | None:
    """Returns the free bytes of the container; None for no limit."""
    free = []
    for folder in _cgroups("memory"):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            with contextlib.suppress(OSError, ValueError):
                allowed = int((folder / limit).read_text())
                if allowed < 2**60:  # version 1 represents "no limit" as a huge number
                    statistics = folder / "memory.stat"  # version 1 includes the groups below only in "total"
                    cached = _read_line(statistics, "total_inactive_file") or _read_line(statistics, "inactive_file")
                    taken = max(0, int((folder / used).read_text()) - (cached or 0))  # page cache is freed first
                    free.append(max(0, allowed - taken))
    return min(free, default=None)


def _read_line(file: pathlib.Path, name: str) -> int | None:
    """Returns the number after ``name`` in a file of such lines."""
    match = re.search(rf"^{name}\s+(\d+)", file.read_text(), re.MULTILINE)
    return int(match[1]) if match else None


def check_dev_shm(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks /dev/shm, which towers do not need, but DataLoader processes and NCCL do."""
    fix = "start the container with --shm-size=1g (docker) or a memory-backed emptyDir at /dev/shm (Kubernetes)"
    try:
        size, _, free = shutil.disk_usage(_DEV_SHM)
    except OSError as error:
        yield warning(_DEV_SHM, f"does not exist ({error.strerror}); num_workers of data loaders and NCCL need it", fix)
        return
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
    return f"{nbytes / _GB:.1f} GB" if nbytes >= _GB else f"{nbytes / _MB:.0f} MB"


def check_disk(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks whether files can be created in the current and temporary directories, and the free space there."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        yield problem("directory", "the current directory has been removed", "cd to one that exists")
        return
    yield _check_folder("directory", here, "the current directory", "cd to a writable directory, or free space there")
    subject, fix = "temporary files", "point TMPDIR to a writable directory with free space"
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError as error:
        yield problem(subject, str(error), fix)
        return
    stated = environ.get("TMPDIR")
    if stated and os.path.realpath(stated) != os.path.realpath(temporary):
        yield warning(
            "TMPDIR",
            f"is {stated!r}, where nothing can be written: temporary files go to {temporary}",
            "make that directory, or unset TMPDIR",
        )
    finding = _check_folder(subject, temporary, "TMPDIR", fix)
    if finding.severity is Severity.OK and len(temporary) > _LONGEST:
        finding = warning(
            subject,
            f"{temporary} is a long path: mirrored.launch and the worker processes of data loaders create "
            "sockets in it, and the path of a socket has at most 107 characters",
            "point TMPDIR to a shorter one, such as /tmp",
        )
    yield finding


def _check_folder(subject: str, folder: str, meaning: str, fix: str) -> Finding:
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".mirrored-doctor-") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return problem(subject, f"nothing can be written to {folder} ({meaning}): {error.strerror}", fix)
    free = shutil.disk_usage(folder).free
    what = f"{folder} is writable, {free / _GB:.1f} GB free"
    if free < 100 * _MB:
        return problem(subject, f"{what}: a checkpoint will hardly fit", fix)
    return warning(subject, what, fix) if free < _GB else ok(subject, what)


def check_limits(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks ``ulimit``: open files, and locked memory if a network card needs it."""
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < _FILES:
        fix = "ulimit -n 4096" if hard < 0 or hard >= 4096 else "as root raise the hard limit (ulimit -Hn), then it"
        yield warning("open files", f"at most {files}; that is little for data loaders' workers and many towers", fix)
    else:
        yield ok("open files", "no limit" if files < 0 else f"at most {files:,}")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked >= 0 and _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir()):
        yield warning(
            "locked memory",
            f"is limited to {locked:,} bytes, but NCCL locks the memory that InfiniBand cards read and write",
            "ulimit -l unlimited (docker: --ulimit memlock=-1; SLURM: PropagateResourceLimitsExcept=MEMLOCK)",
        )


def check_versions(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Checks Python, torch, numpy and safetensors."""
    try:
        required = importlib.metadata.requires(_PACKAGE) or []
        python = str(importlib.metadata.metadata(_PACKAGE)["Requires-Python"] or "")
    except importlib.metadata.PackageNotFoundError:
        yield note(
            "versions",
            f"Python {platform.python_version()} at {sys.executable}; {_PACKAGE} is imported, but not installed, so "
            "the ranges that it needs are unknown",
            "pip install it (pip install -e PATH_TO_THE_CLONE)",
        )
        return
    yield compare_version("Python", platform.python_version(), python, "use a Python in this range")
    for requirement in required:
        if ";" in requirement:  # an extra
            continue
        match = re.match(r"([\w.-]+)\s*(.*)", requirement)
        assert match is not None, requirement
        name, ranges = match.groups()
        try:
            installed = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield problem(name, "is not installed", f"pip install '{requirement}'")
            continue
        yield compare_version(name, installed, ranges, f"pip install '{requirement}'")


def compare_version(name: str, version: str, ranges: str, fix: str) -> Finding:
    """Checks whether ``version`` is in ``ranges``, such as ``">=2.9,<2.14"``."""
    for bound in filter(None, map(str.strip, ranges.split(","))):
        match = re.fullmatch(r"(>=|<)\s*([\d.]+)", bound)
        if match is None:
            return warning(name, f"{version}; the bound {bound!r} cannot be read here", "see pyproject.toml")
        operator, limit = match.groups()
        if (_numbers(version) >= _numbers(limit)) != (operator == ">="):
            return problem(name, f"{version} is outside of {ranges}", fix)
    return ok(name, f"{version} ({ranges})")


def _numbers(version: str) -> tuple[int, ...]:
    """Returns ``"2.13.0a0+cu126"`` as (2, 13), without zeros at the end."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    numbers = [int(number) for number in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
