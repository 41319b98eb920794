"""The process that a several-tower program becomes: torchrun's agent, with one terminal and one voice.

[Note: the agent is torchrun's] Starting, watching and collecting the towers is :mod:`torch.distributed.elastic`'s, the
engine of ``torchrun``. Plain ``python -m torch.distributed.run`` prints each failure as a banner without its cause,
exits with 1 whatever the script's exit code was, leaves a temporary directory behind at each start, can silence
standard output only into files, and meets workers with a time-out that names none of them. What is added here:

- how towers end (:mod:`towers.launching.supervision`);
- the chief's output plain, the other towers silent but for prefixed warnings and errors
  (:mod:`towers.launching.console`);
- the first exception whole, last which tower failed where, and its exit code (:mod:`towers.launching.exit_report`);
- workers that find each other before a deadline, and say which are missing (:mod:`towers.launching.rendezvous`).
"""

from __future__ import annotations

import logging
import os
import pathlib
import secrets
import shlex
import signal
import sys
import uuid
from collections.abc import Sequence
from typing import NoReturn

from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException

from towers.errors import TowersError
from towers.health.failure import leave
from towers.launching import console, processes, rendezvous
from towers.launching.exit_report import ExitReport, make_exit_report
from towers.launching.failure_broadcast import FailureBroadcast
from towers.launching.job import Job
from towers.launching.supervision import Supervisor
from towers.system import machine
from towers.system.log import get_logger
from towers.topology import AGENT, DEVICES, JOB_TOKEN, STARTED_BY

log = get_logger("towers")


def main(arguments: Sequence[str]) -> NoReturn:
    """What the command line of :func:`towers.launching.job.agent_command` runs.

    The interpreter is not taken down at the end: Python would end a thread that comes back from a store in C++ just
    then, as those of :mod:`towers.launching.failure_broadcast` do, by unwinding code that must not throw, and the
    process would abort ("terminate called without an active exception").
    """
    try:
        word, *program = arguments
        job = Job.from_json(word)
    except (ValueError, TypeError, AttributeError):
        sys.exit("usage: python …/towers JOB PROGRAM …, as mirrored starts it; by hand: mirrored run --towers N SCRIPT")
    leave(run(job, program))


def run(job: Job, program: Sequence[str]) -> int:
    """Run the towers to their end, see [Note: the agent is torchrun's].

    Returns:
        The exit code: the first failing tower's, 0 when none failed.
    """
    _set_environment(job)
    log.debug("worker %d of %d starts %d towers: %s", job.worker, job.workers, job.towers, shlex.join(program))
    try:
        report = _run(job, program)
    except SignalException as stopped:
        _die_by(stopped.sigval)
    except KeyboardInterrupt:
        _die_by(signal.SIGINT)
    except (TowersError, OSError) as error:
        print(f"towers: {error}", file=sys.stderr, flush=True)
        return 1
    log.debug("worker %d of %d has ended with exit code %d", job.worker, job.workers, report.code)
    if report.died_of is not None:
        _die_by(report.died_of)
    if report.text:
        print(report.text, file=sys.stderr, flush=True)
    return report.code


def _set_environment(job: Job) -> None:
    """What all towers of this machine inherit."""
    os.environ[STARTED_BY] = job.started_by
    os.environ[AGENT] = str(os.getpid())
    if job.devices:
        os.environ[DEVICES] = ",".join(job.devices)
    if job.workers == 1:
        os.environ[JOB_TOKEN] = secrets.token_hex()
        machine.listen_on()
    if job.towers > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(machine.threads_per_tower(job.towers)))
    if not log.isEnabledFor(logging.DEBUG):
        # torch's own report of a failure (dozens of lines, the cause not among them) is replaced by ours.
        logging.disable(logging.CRITICAL)


def _run(job: Job, program: Sequence[str]) -> ExitReport:
    """Start the towers and wait for their end; on return, all that they have printed has been passed on."""
    token = os.environ.get(JOB_TOKEN, "")
    broadcast = FailureBroadcast(token)
    with console.Relay() as relay:
        handler = rendezvous.Rendezvous(job, uuid.uuid4().hex, token)
        # torchrun fills in ${local_rank} and the like; the script's arguments are to arrive as they were typed.
        words = tuple(word.replace("$", "$$") for word in program[1:])
        spec = WorkerSpec(
            role="tower",
            local_world_size=job.towers,
            rdzv_handler=handler,
            entrypoint=program[0],
            args=words,
            max_restarts=0,
            monitor_interval=0.1,
        )
        logs = TowerLogs(relay, job.log_dir)
        supervisor = Supervisor(job, spec, logs, broadcast, relay.directory)
        result = supervisor.run()
        report = make_exit_report(supervisor, result)
    broadcast.wait_until_received()
    return report


class TowerLogs(LogsSpecs):
    """The first tower of the machine keeps the terminal; the others are silent but for prefixed errors.

    Args:
        relay: carries the other towers' standard error.
        log_dir: a directory for files ``tower<index>.out`` and ``.err`` of the other towers; None: no files.
    """

    def __init__(self, relay: console.Relay, log_dir: str | None) -> None:
        super().__init__(log_dir=log_dir)
        self._relay = relay

    @property
    def root_log_dir(self) -> str:
        return self._root_log_dir or os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Name every stream's destination, for the towers whose environments are given (by local index)."""
        folder = pathlib.Path(self._root_log_dir) if self._root_log_dir else None
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
        stdouts, stderrs, error_files = {}, {}, {}
        for local, variables in envs.items():
            tower = int(variables["RANK"])
            variables.update(processes.file_variables(self._relay.directory, tower))
            error_files[local] = ""  # torch would end with an error where a report is none
            if local == 0:
                stdouts[local] = stderrs[local] = ""  # as they are: the terminal
                continue
            stdouts[local] = str(folder / f"tower{tower}.out") if folder else os.devnull
            copy = folder / f"tower{tower}.err" if folder else None
            stderrs[local] = self._relay.prefixed("stderr", f"tower {tower}", copy)
        return LogsDest(stdouts=stdouts, stderrs=stderrs, error_files=error_files)


def _die_by(number: int) -> NoReturn:
    """End by the signal that ended the job, so that the shell sees what it would see of one process."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    raise SystemExit(128 + number)
