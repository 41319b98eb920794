"""Two CPU towers: do they start, share memory, and average what they should?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from mirrored.doctor import towers_job
from mirrored.doctor.finding import Finding, ok, problem, warning
from towers.errors import TowerFailedError

_SUBJECT = "CPU towers"
_DEVICES = ("cpu:0", "cpu:1")
_SECONDS = 25.0


def check(environ: Mapping[str, str]) -> Iterator[Finding]:
    """A job through shared memory; where that fails, one through Gloo, and why."""
    try:
        seen = towers_job.run(_DEVICES, "shared_memory", _SECONDS)
    except TowerFailedError as error:
        why_not = towers_job.reason(error)
    else:
        yield _judged(seen)
        return
    try:
        seen = towers_job.run(_DEVICES, "gloo", _SECONDS)
    except TowerFailedError as error:
        yield problem(
            _SUBJECT,
            f"two towers cannot work together on this machine: {towers_job.reason(error)}",
            "mend the other problems and warnings first, above all those of the network: this follows from many",
        )
        return
    yield _judged(seen)
    yield warning(
        _SUBJECT,
        f"they cannot share memory and use Gloo, which is slower: {why_not}",
        "towers need memfd_create, and to open each other's /proc/<process>/fd: one user, one container, no sandbox "
        "that hides processes from each other",
    )


def _judged(seen: towers_job.Seen) -> Finding:
    small, large = (f"{seconds * 1e3:.3g} ms" for seconds in seen.seconds)
    what = f"two towers, {seen.backend}: averaging 4 KB takes {small}, 32 MB {large}"
    if not seen.right:
        return problem(_SUBJECT, f"{what}, and the averages are wrong", "please report it, with all of this output")
    return ok(_SUBJECT, what)
