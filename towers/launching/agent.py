"""The process that a several-tower program becomes: torchrun's agent, with one terminal and one voice.

Starting, watching and collecting the towers is :mod:`torch.distributed.elastic`'s, the engine of ``torchrun``. What is
added is how they end (:mod:`towers.launching.supervision`), and what a person sees: the chief's output plain, the other
towers silent but for prefixed warnings and errors (:mod:`towers.launching.console`), the first exception whole, and
last who failed where (:mod:`towers.launching.exit_report`), its exit code, and workers that find each other with a
deadline and say who is missing (:mod:`towers.launching.rendezvous`).

``python train.py`` on a machine with two GPUs becomes::

    python …/towers --towers 2 … -- python train.py
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import secrets
import signal
import sys
import uuid
from collections.abc import Sequence
from typing import NoReturn

from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.multiprocessing import SignalException

from towers import topology
from towers.errors import TowersError
from towers.health.failure import leave
from towers.joining.messages import JOB_TOKEN
from towers.launching import console, job_control, rendezvous
from towers.launching.agent_logs import TowerLogs
from towers.launching.exit_report import Outcome, ended_well, judge
from towers.launching.failure_broadcast import News
from towers.launching.job import Job
from towers.launching.supervision import Supervisor
from towers.system import machine, network


def main(arguments: Sequence[str]) -> NoReturn:
    """What ``python …/towers …`` does: :func:`run`, as :func:`towers.launching.job.agent_command` has written it down.

    The interpreter is not taken down at the end: a thread that comes back from a store meanwhile, as those of
    :mod:`towers.launching.failure_broadcast` do, would abort the process ("terminate called without an active
    exception").
    """
    leave(run(*_parse(arguments)))


def run(job: Job, program: Sequence[str]) -> int:
    """Run the towers to their end. Returns the exit code: the first failing tower's, 0 when none failed."""
    _set_environment(job)
    job_control.stop_and_continue_together()
    try:
        outcome = _run(job, program)
    except SignalException as stopped:
        _die_by(stopped.sigval)
    except KeyboardInterrupt:
        _die_by(signal.SIGINT)
    except (TowersError, OSError) as error:
        print(f"towers: {error}", file=sys.stderr, flush=True)
        return 1
    if outcome.died_of is not None:
        _die_by(outcome.died_of)
    if outcome.text:
        print(outcome.text, file=sys.stderr, flush=True)
    return outcome.code


def _parse(arguments: Sequence[str]) -> tuple[Job, list[str]]:
    parser = argparse.ArgumentParser(prog="towers", description=__doc__, allow_abbrev=False)
    parser.add_argument("--towers", type=int, required=True)
    parser.add_argument("--worker", type=int, default=0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--addresses", type=_comma_separated, default=())
    parser.add_argument("--devices", type=_comma_separated, default=())
    parser.add_argument("--origin", default="the command line")
    parser.add_argument("--started-by", default="python")
    parser.add_argument("--startup-seconds", type=float, default=300.0)
    parser.add_argument("--log-dir")
    parser.add_argument("program", nargs="+")
    parsed = vars(parser.parse_args(arguments))
    program = parsed.pop("program")
    return Job(**parsed), program


def _comma_separated(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _set_environment(job: Job) -> None:
    """What all towers of this machine inherit."""
    os.environ[topology.STARTED_BY] = job.started_by
    os.environ[topology.AGENT] = str(os.getpid())
    if job.devices:
        os.environ[topology.DEVICES] = ",".join(job.devices)
    if job.workers == 1:
        os.environ[JOB_TOKEN] = secrets.token_hex()
        network.keep_to_loopback()
    if job.towers > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(machine.threads_per_tower(job.towers)))
    # torch's own report of a failure (dozens of lines, the cause not among them) is replaced by ours.
    logging.disable(logging.CRITICAL)


def _run(job: Job, program: Sequence[str]) -> Outcome:
    """Start the towers and wait for their end; when it is judged, all that they have printed has been passed on."""
    token = os.environ.get(JOB_TOKEN, "")
    news = News(token)
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
        well = functools.partial(ended_well, job, records=relay.directory)
        supervisor = Supervisor(spec, logs, _ignored_signals(), news, well, relay.directory)
        result = supervisor.run()
        outcome = judge(job, supervisor, result, relay.directory, news)
    news.wait_until_heard()
    return outcome


def _ignored_signals() -> frozenset[signal.Signals]:
    """What whoever started us had ignored (``nohup``) stays ignored."""
    ending = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    return frozenset(number for number in ending if signal.getsignal(number) == signal.SIG_IGN)


def _die_by(number: int) -> NoReturn:
    """End by the signal that ended the job, so that the shell sees what it would see of one process."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    raise SystemExit(128 + number)
