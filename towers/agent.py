"""The process that a several-tower program becomes: torchrun's agent, with one terminal and one voice.

Starting, watching and ending the towers is all :mod:`torch.distributed.elastic`'s, the engine of ``torchrun``.
What is added here is what a person sees: the chief's output plain, the other towers silent but for prefixed
warnings and errors (:mod:`towers.console`), the first exception whole and last, its exit code, and workers
that find each other with a deadline and say who is missing (:mod:`towers.rendezvous`).

``python train.py`` on a machine with two GPUs becomes::

    python …/towers --towers 2 … -- python train.py
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from typing import Any, NoReturn

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from towers import console, job_control, machine, rendezvous, topology
from towers.agent_logs import TowerLogs
from towers.errors import TowersError
from towers.failure import signal_name
from towers.job import Job


def main(arguments: Sequence[str]) -> int:
    """What ``python …/towers …`` does: :func:`run`, as :func:`towers.job.agent_command` has written it down."""
    return run(*_parse(arguments))


def run(job: Job, program: Sequence[str]) -> int:
    """Run the towers to their end. Returns the exit code: the first failing tower's, 0 when none failed."""
    _set_environment(job)
    job_control.stop_and_continue_together()
    try:
        _run(job, program)
    except ChildFailedError as failed:
        return _report(failed)
    except SignalException as stopped:
        _die_by(stopped.sigval)
    except KeyboardInterrupt:
        _die_by(signal.SIGINT)
    except (TowersError, OSError) as error:
        print(f"towers: {error}", file=sys.stderr, flush=True)
        return 1
    return 0


def _parse(arguments: Sequence[str]) -> tuple[Job, list[str]]:
    parser = argparse.ArgumentParser(prog="towers.agent", description=__doc__, allow_abbrev=False)
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
    if job.towers > 1:
        os.environ.setdefault("OMP_NUM_THREADS", str(machine.threads_per_tower(job.towers)))
    # torch's own report of a failure (dozens of lines, the cause not among them) is replaced by ours.
    logging.disable(logging.CRITICAL)


def _run(job: Job, program: Sequence[str]) -> None:
    rendezvous_handler_registry.register("towers", rendezvous.create_handler)
    with console.Relay() as relay:
        known = {field.name for field in dataclasses.fields(LaunchConfig)}
        settings: dict[str, Any] = {
            "min_nodes": job.workers,
            "max_nodes": job.workers,
            "nproc_per_node": job.towers,
            "run_id": uuid.uuid4().hex,
            "role": "tower",
            "rdzv_backend": "towers",
            "rdzv_endpoint": job.addresses[0] if job.addresses else "127.0.0.1:0",
            "rdzv_configs": {"job": job, "timeout": job.startup_seconds},
            "max_restarts": 0,
            "monitor_interval": 0.1,
            "logs_specs": TowerLogs(relay, job.log_dir),
            "shutdown_timeout": 5,
            "signals_to_handle": ",".join(_signals_to_handle()),
        }
        config = LaunchConfig(**{name: value for name, value in settings.items() if name in known})
        # torchrun fills in ${local_rank} and the like; the script's arguments are to arrive as they were typed.
        elastic_launch(config, program[0])(*(word.replace("$", "$$") for word in program[1:]))


def _signals_to_handle() -> list[str]:
    """Those that end a program, but for what whoever started us had ignored (``nohup``)."""
    names = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
    return [name for name in names if signal.getsignal(getattr(signal, name)) != signal.SIG_IGN]


def _report(failed: ChildFailedError) -> int:
    """Print the first failure, whole, as the last thing; return the exit code it stands for."""
    failures = failed.failures
    reports = {tower: _details(failure.error_file_data) for tower, failure in failures.items()}
    # A tower that was ended because of another has no report; one that only lost its peer is a consequence.
    own = {tower: failure for tower, failure in failures.items() if failure.exitcode != -signal.SIGTERM}
    first = min(
        own or failures,
        key=lambda tower: (
            bool(reports[tower].get("consequence")),
            reports[tower].get("time", failures[tower].timestamp),
        ),
    )
    failure, details = failures[first], reports[first]
    if trace := str(details.get("py_callstack", "")):
        print(f"towers: tower {first} failed:\n{trace.rstrip()}", file=sys.stderr, flush=True)
    elif failure.exitcode < 0:
        print(f"towers: tower {first} was ended by {signal_name(-failure.exitcode)}", file=sys.stderr, flush=True)
    else:
        print(f"towers: tower {first} ended with exit code {failure.exitcode}", file=sys.stderr, flush=True)
    return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode


def _details(data: dict[str, object]) -> dict[str, object]:
    message = data.get("message")
    details = message.get("extraInfo") if isinstance(message, dict) else None
    return details if isinstance(details, dict) else {}


def _die_by(number: int) -> NoReturn:
    """End by the signal that ended the job, so that the shell sees what it would see of one process."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    raise SystemExit(128 + number)
