"""CPU cores, and the threads that towers would take of them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

from mirrored.doctor import cgroup
from mirrored.doctor.finding import Finding, note, ok, problem, warning
from towers.system import machine


def check(environ: Mapping[str, str]) -> Iterator[Finding]:
    """Cores, a container's CPU limit, OMP_NUM_THREADS."""
    seen, granted = machine.cores(), cgroup.cpus()
    present = os.cpu_count() or seen
    some = f" of {present}" if seen < present else ""
    what = f"{seen}{some} core{'s' if seen > 1 else ''}; two CPU towers take {machine.threads_per_tower(2)} each"
    stated = environ.get("OMP_NUM_THREADS", "")
    if granted is not None and granted < seen * 0.9:
        threads = max(1, round(granted / 2))
        limit = f"{what}, but the container's limit is {granted:.3g} CPUs"
        if stated.isascii() and stated.isdigit():
            yield note("CPU", limit)
        else:
            yield warning(
                "CPU",
                f"{limit}: more threads than that are stopped again and again",
                f"set OMP_NUM_THREADS to the limit divided by the towers ({threads} for two), or raise the limit",
            )
    else:
        yield ok("CPU", what)
    if not stated:
        return
    subject = "OMP_NUM_THREADS"
    first = stated.split(",")[0].strip()
    if not re.fullmatch("[0-9]{1,9}", first) or int(first) == 0:
        yield problem(subject, f"is {stated!r}, which is no number of threads", f"unset {subject}, or set a number")
    elif int(first) > seen:
        yield warning(
            subject,
            f"is {stated}, but this process has {seen} cores, which all its towers share",
            f"unset {subject}: towers then share the cores out among them",
        )
    else:
        alone = f"; a single tower on the CPU leaves {seen - int(first)} of {seen} cores idle"
        yield note(subject, f"is {stated} and wins over the towers' own choice{alone if int(first) < seen else ''}")
