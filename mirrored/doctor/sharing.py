"""What CPU towers of one host need of the system to share memory."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterator, Mapping

from mirrored.doctor.finding import Finding, note, ok, warning
from towers.collectives.shared_memory import semaphores
from towers.collectives.shared_memory.segment import Segment

_PTRACE_SCOPE = pathlib.Path("/proc/sys/kernel/yama/ptrace_scope")
_SUBJECT = "shared memory"


def check(environ: Mapping[str, str]) -> Iterator[Finding]:
    """memfd_create, /proc, semaphores and pidfd_open. That towers really share memory is tried by a job."""
    missing = []
    try:
        segment = Segment.create(1, reserve=True)
        Segment.open(os.getpid(), segment.file)
    except OSError as error:
        missing.append(f"memory from memfd_create, opened by /proc/{os.getpid()}/fd ({error})")
    if not semaphores.available():
        missing.append("POSIX semaphores that processes share")
    if missing:
        yield warning(
            _SUBJECT,
            f"not on this system: {'; '.join(missing)}. CPU towers use Gloo, which is slower",
            "mount /proc, and let the sandbox or the seccomp profile allow memfd_create",
        )
    else:
        yield ok(_SUBJECT, "memfd_create, /proc and semaphores are there")
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        yield note(
            "pidfd_open",
            f"is not there ({error}): towers see by the process number that another has ended",
            "nothing needs to be done; Linux 5.3 and a newer seccomp profile have it",
        )
    if environ.get("NCCL_HOSTID"):
        yield note(
            "NCCL_HOSTID",
            f"is {environ['NCCL_HOSTID']!r}: only towers with the same value take each other for neighbours that can "
            "share memory",
            "unset NCCL_HOSTID unless it is there on purpose",
        )
    if _PTRACE_SCOPE.exists() and (scope := _PTRACE_SCOPE.read_text().strip()) != "0":
        yield ok("ptrace_scope", f"is {scope}, which does not touch sharing memory (only debuggers, such as py-spy)")
