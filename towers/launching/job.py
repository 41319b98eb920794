"""A job of several towers, as the agents that run it have to know it."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Job:
    """What is to be started on this machine, as part of what.

    Attributes:
        towers: towers on this machine.
        worker, workers: this machine's index among the cluster's workers, and how many there are.
        addresses: ``host:port`` of every worker, in order; empty for a job on one machine.
        origin: where the cluster was read from, for messages.
        started_by: what the person typed, for the log.
        devices: this machine's devices, one per tower; empty to leave the choice to the script.
        startup_seconds: how long workers wait for each other.
        log_dir: where the other towers' output is kept; None keeps nothing.
    """

    towers: int
    worker: int = 0
    workers: int = 1
    addresses: tuple[str, ...] = ()
    origin: str = "the command line"
    started_by: str = "python"
    devices: tuple[str, ...] = ()
    startup_seconds: float = 300.0
    log_dir: str | None = None


def agent_command(job: Job, program: Sequence[str]) -> list[str]:
    """The command line of an agent (:mod:`towers.launching.agent`) that runs ``program``, a whole command, in every
    tower."""
    words = [sys.executable, str(pathlib.Path(__file__).resolve().parents[1]), "--towers", str(job.towers)]
    if job.workers > 1:
        words += ["--worker", str(job.worker), "--workers", str(job.workers)]
        words += ["--addresses", ",".join(job.addresses), "--startup-seconds", str(job.startup_seconds)]
    if job.devices:
        words += ["--devices", ",".join(job.devices)]
    if job.log_dir:
        words += ["--log-dir", job.log_dir]
    words += ["--origin", job.origin, "--started-by", job.started_by]
    return [*words, "--", *program]
