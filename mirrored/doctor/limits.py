"""The limits that a shell or a service gives its processes (``ulimit``)."""

from __future__ import annotations

import pathlib
import resource
from collections.abc import Iterator, Mapping

from mirrored.doctor.finding import Finding, ok, warning

_FILES = 1024
_INFINIBAND = pathlib.Path("/sys/class/infiniband")


def check(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Open files, processes, sizes of files and memory; locked memory where a network card needs it."""
    files, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= files < _FILES:
        raised = "ulimit -n 4096" if hard < 0 or hard >= 4096 else "as root raise the hard limit (ulimit -Hn), then it"
        yield warning(
            "open files", f"at most {files}; that is little for data loaders' workers and many towers", raised
        )
    else:
        yield ok("open files", f"at most {_limit(files)}")
    for subject, number, why, fix in (
        ("file size", resource.RLIMIT_FSIZE, "shared memory and checkpoints are files", "ulimit -f unlimited"),
        (
            "address space",
            resource.RLIMIT_AS,
            "CUDA and shared memory map much that they never use",
            "ulimit -v unlimited",
        ),
        ("data segment", resource.RLIMIT_DATA, "torch takes what it needs at once", "ulimit -d unlimited"),
        (
            "CPU time",
            resource.RLIMIT_CPU,
            "a training is ended by SIGXCPU when it has used it up",
            "ulimit -t unlimited",
        ),
    ):
        soft, _ = resource.getrlimit(number)
        if soft >= 0:
            yield warning(subject, f"is limited to {soft:,} {'s' if subject == 'CPU time' else 'bytes'}: {why}", fix)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked >= 0 and _INFINIBAND.is_dir() and any(_INFINIBAND.iterdir()):
        yield warning(
            "locked memory",
            f"is limited to {locked:,} bytes, but NCCL locks what InfiniBand cards read and write",
            "ulimit -l unlimited (docker: --ulimit memlock=-1; SLURM: PropagateResourceLimitsExcept=MEMLOCK)",
        )


def _limit(value: int) -> str:
    return "any number" if value < 0 else f"{value:,}"
