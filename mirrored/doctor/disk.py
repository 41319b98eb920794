"""The places where a training writes: the current directory and the one for temporary files."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping

from mirrored.doctor.finding import Finding, Severity, ok, problem, warning

_MB = 2**20
_LONGEST = 60  # characters; Python's fork server adds some 40, and the kernel takes 107 in a socket's address


def check(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Whether files can be made there, and how much room is left."""
    try:
        here = os.getcwd()
    except FileNotFoundError:
        yield problem("directory", "the current directory has been removed", "cd to one that is there")
        return
    yield _look("directory", here, "the current directory", "cd to a directory of your own, or make room there")
    try:
        temporary = tempfile.gettempdir()
    except FileNotFoundError as error:
        yield problem("temporary files", str(error), "point TMPDIR to a writable directory with room")
        return
    stated = environ.get("TMPDIR")
    if stated and os.path.realpath(stated) != os.path.realpath(temporary):
        yield warning(
            "TMPDIR",
            f"is {stated!r}, where nothing can be written: temporary files go to {temporary}",
            "make that directory, or unset TMPDIR",
        )
    found = _look("temporary files", temporary, "TMPDIR", "point TMPDIR to a writable directory with room")
    if found.severity is Severity.OK and len(temporary) > _LONGEST:
        found = warning(
            "temporary files",
            f"{temporary} is a long path: mirrored.launch and data loaders' workers make sockets there, whose path "
            "has 107 characters at most",
            "point TMPDIR to a shorter one, such as /tmp",
        )
    yield found


def _look(subject: str, folder: str, meaning: str, fix: str) -> Finding:
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".mirrored-doctor-") as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return problem(subject, f"nothing can be written to {folder} ({meaning}): {error.strerror}", fix)
    free = shutil.disk_usage(folder).free
    what = f"{folder} is writable, {free / 2**30:.1f} GB free"
    if free < 100 * _MB:
        return problem(subject, f"{what}: a checkpoint will hardly fit", fix)
    if free < 2**30:
        return warning(subject, what, fix)
    return ok(subject, what)
