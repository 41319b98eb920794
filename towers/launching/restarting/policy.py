"""Decides how many towers a job may continue with after a failure: the rules of ``restarts`` and ``min_towers``."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Sequence

from towers.errors import StartupError
from towers.launching.job import Job

_COUNT_SECONDS = 300.0  # time for a new process to load torch and count devices; a driver may hang


def check_restarts(
    restarts: int, min_towers: int | None, virtual_towers: int | None, towers: int | None = None
) -> None:
    """Checks that a strategy's options, or those of ``mirrored run``, fit each other.

    Args:
        towers: the number of towers of the job, if it is known.

    Raises:
        ValueError: they do not.
    """
    if not isinstance(restarts, int) or isinstance(restarts, bool) or restarts < 0:
        raise ValueError(f"restarts is {restarts!r}, but must be a whole number from 0")
    if min_towers is None:
        return
    if not isinstance(min_towers, int) or isinstance(min_towers, bool) or min_towers < 1:
        raise ValueError(f"min_towers is {min_towers!r}, but must be a positive whole number")
    if not restarts:
        raise ValueError(f"min_towers={min_towers} is for jobs that restart: pass restarts=, too")
    if towers is not None and min_towers > towers:
        raise ValueError(f"min_towers is {min_towers}, but the job has {towers} towers")
    if virtual_towers is not None and virtual_towers % min_towers:
        raise ValueError(
            f"min_towers is {min_towers}, but virtual_towers={virtual_towers} is split into equal parts: pass a "
            "number that divides it"
        )


def choose_members(job: Job, present: Sequence[int]) -> list[int]:
    """Returns as many of the present workers as can take part; empty if they are too few for ``min_towers``."""
    count = next((count for count in range(len(present), 0, -1) if _fits(job, count * job.towers)), 0)
    return list(present[:count])


def on_devices_left(job: Job) -> Job:
    """Returns a single worker's job on the devices that a new process sees, because some may have been lost.

    Raises:
        StartupError: the devices are too few for ``min_towers``, or cannot be counted.
    """
    program = "import torch; print(torch.accelerator.device_count())"
    command = [sys.executable, "-c", program]
    try:
        answer = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, timeout=_COUNT_SECONDS).stdout
    except subprocess.TimeoutExpired:
        raise StartupError(f"a new process could not count the devices within {_COUNT_SECONDS:.0f} s") from None
    count = int(answer) if answer.strip().isdecimal() else 0
    named = tuple(device for device in job.devices if int(device.partition(":")[2]) < count)
    left = len(named) if job.devices else min(job.towers, count)
    towers = next((towers for towers in range(left, 0, -1) if _fits(job, towers)), 0)
    if not towers:
        raise StartupError(
            f"{left} of {job.towers} devices are left, which are too few for min_towers={job.min_towers}"
        )
    if towers < job.towers:
        print(
            f"mirrored: {towers} of {job.towers} towers continue, on the devices that are left",
            file=sys.stderr,
            flush=True,
        )
    return dataclasses.replace(job, towers=towers, devices=named[:towers])


def _fits(job: Job, towers: int) -> bool:
    return towers >= (job.min_towers or 1) and (job.virtual_towers or towers) % towers == 0
