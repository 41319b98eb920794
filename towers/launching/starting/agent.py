"""The process that a program with several towers becomes: torchrun's agent, with one terminal and one report.

[Note: the agent is torchrun's] :mod:`torch.distributed.elastic`, the engine of ``torchrun``, starts, watches and
collects the towers. Plain ``python -m torch.distributed.run`` prints each failure as a banner without its cause. It
exits with 1, whatever the script's exit code was, and leaves a temporary directory behind at each start. It can
redirect standard output only into files, and its time-out for missing workers names none of them. ``mirrored`` adds:

- how towers end (:mod:`towers.launching.supervising.attempt`);
- the chief's output unchanged, and only prefixed warnings and errors of the other towers
  (:mod:`towers.launching.console`);
- the root cause with its traceback, then a last line with the tower and the place of its failure. The failed
  tower's exit code becomes the job's (on workers without a failed tower: only the last line, and exit code 1);
- workers that wait for each other until a deadline, and report which workers are missing
  (:mod:`towers.launching.restarting.meeting`);
- on request, another start after a failure (:mod:`towers.launching.restarting.restarts`).
"""

from __future__ import annotations

import functools
import logging
import os
import pathlib
import secrets
import shlex
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch.distributed.elastic.agent.server import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException

from towers.errors import CannotStartError, TowersError
from towers.health.failure import leave
from towers.launching import console
from towers.launching.job import Job
from towers.launching.restarting.rendezvous import Rendezvous
from towers.launching.starting.fork_server import fork_towers
from towers.launching.supervising.attempt import Attempt, Ending, ending_of, see_children_end
from towers.system import machine
from towers.system.messages import get_logger
from towers.topology import AGENT, DEVICES, JOB_TOKEN, STARTED_BY, TOWER

_FORWARDED = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}

log = get_logger("towers")


def main(arguments: Sequence[str]) -> NoReturn:
    """Runs the command line of :func:`towers.launching.job.agent_command`."""
    try:
        word, *program = arguments
        job = Job.from_json(word)
    except (ValueError, TypeError, AttributeError):
        sys.exit("usage: python …/towers JOB PROGRAM …, as mirrored starts it; by hand: mirrored run --towers N SCRIPT")
    run(job, program)


def run(job: Job, program: Sequence[str], path: Sequence[str] | None = None) -> NoReturn:
    """Runs the towers to their end, and ends this process with the job's exit code.

    See [Note: the agent is torchrun's].

    The exit code is the first failing tower's. It is 1 if only other workers' towers failed, 75 if all towers have
    saved and ended on a signal, and 0 if no tower failed.

    The interpreter is not finalized. Otherwise Python would end a thread that returns from a store in C++ at that time,
    such as those of :mod:`towers.launching.supervising.failure_broadcast`, by unwinding code that must not throw. The
    process would abort ("terminate called without an active exception").

    Args:
        path: ``sys.path`` of a new Python, without the entry for its program. Default: this process's.
    """
    see_children_end()
    fork_towers(sys.path if path is None else path)
    log.debug("worker %d of %d starts %d towers: %s", job.worker, job.workers, job.towers, shlex.join(program))
    for number in {each for each in _FORWARDED if signal.getsignal(each) != signal.SIG_IGN}:
        signal.signal(number, _stop)
    try:
        _set_environment(job)
        ending = _run(job, program)
    except SignalException as stopped:
        _die_by(stopped.sigval)
    except (TowersError, OSError) as error:
        ending = Ending(1, f"mirrored: {error}")
    log.debug("worker %d of %d has ended with exit code %d", job.worker, job.workers, ending.code)
    if ending.code < 0:
        _die_by(-ending.code)
    if ending.text:
        print(ending.text, file=sys.stderr, flush=True)
    leave(ending.code)


def _set_environment(job: Job) -> None:
    """Sets the variables that all towers of this machine inherit.

    Raises:
        CannotStartError: the towers' devices cannot work together.
    """
    os.environ.pop(TOWER, None)  # of a tower that has started this job
    os.environ[STARTED_BY] = job.started_by
    os.environ[AGENT] = str(os.getpid())
    if job.devices:
        os.environ[DEVICES] = ",".join(job.devices)
    if job.workers == 1:
        os.environ[JOB_TOKEN] = secrets.token_hex()
        machine.listen_on()
    if job.towers > 1:
        machine.set_default_threads(os.environ, job.towers)
    if job.kind == "tpu":
        set_tpu_environment(job.towers, job.worker, job.workers)
    if not log.isEnabledFor(logging.DEBUG):
        # mirrored's report replaces torch's own report of a failure (dozens of lines, without the cause).
        elastic = logging.getLogger("torch.distributed.elastic")
        elastic.addHandler(logging.NullHandler())
        elastic.propagate = False


def set_tpu_environment(towers: int, worker: int, workers: int) -> None:
    """Sets the variables with which this host's towers find the TPUs of all towers, before they are started.

    The reason is in :mod:`towers.system.accelerator`, [Note: a TPU has two numbers].

    Raises:
        CannotStartError: torch_tpu cannot determine the variables, or they are already set for a different number of
            towers.
    """
    from towers.system.accelerator import ADDRESSES

    if workers > 1 and "TORCH_TPU_TOPOLOGY" not in os.environ:
        raise CannotStartError("TORCH_TPU_TOPOLOGY is not set: on several hosts it is the whole slice's, as 4,4,1")
    os.environ.setdefault("NODE_RANK", str(worker))  # otherwise, torch_tpu queries a TPU in a new process
    try:
        torch.tpu.distributed.set_tpu_launch_env(nnodes=workers, nproc_per_node=towers)  # type: ignore[attr-defined]
    except (RuntimeError, ValueError) as error:
        raise CannotStartError(f"torch_tpu cannot start {towers} towers on this host: {error}") from error
    if (count := os.environ[ADDRESSES].count(",") + 1) != towers * workers:
        raise CannotStartError(f"{ADDRESSES} is for {count} towers, but {towers * workers} are to start: unset it")


def _run(job: Job, program: Sequence[str]) -> Ending:
    """Runs the towers. When it returns, all output of the towers has been printed."""
    token = os.environ.get(JOB_TOKEN, "")
    with console.Relay() as relay:
        run_attempt = functools.partial(_run_attempt, program, relay)
        if job.restarts:
            from towers.launching.restarting.restarts import run_attempts

            return run_attempts(job, token, relay.directory, run_attempt)
        if job.addresses:
            from towers.launching.restarting.meeting import WorkersRendezvous
            from towers.launching.supervising.failure_broadcast import FailureBroadcast

            attempt = Attempt(relay.directory, broadcast=FailureBroadcast(token), groups=True)
            return run_attempt(job, attempt, WorkersRendezvous(job, token))
        return run_attempt(job, Attempt(relay.directory, groups=True), Rendezvous(job, token))


def _run_attempt(
    program: Sequence[str], relay: console.Relay, job: Job, attempt: Attempt, rendezvous: Rendezvous
) -> Ending:
    # torchrun replaces ${local_rank} and similar words; the script must receive its arguments as they were typed.
    words = tuple(word.replace("$", "$$") for word in program[1:])
    spec = WorkerSpec(
        role="tower",
        local_world_size=job.towers,
        rdzv_handler=rendezvous,
        entrypoint=program[0],
        args=words,
        max_restarts=0,
        monitor_interval=0.1,
    )
    Supervisor(attempt, spec, TowerLogs(relay, attempt, rendezvous, job.log_dir)).run()
    ending = ending_of(job, attempt)
    attempt.broadcast.leave()
    return ending


class TowerLogs(LogsSpecs):
    """The destinations of the towers' output.

    The machine's first tower keeps the terminal. For the other towers, only prefixed errors are printed.

    Args:
        relay: prints the other towers' standard error, with a prefix.
        attempt: the towers that are started.
        rendezvous: has the attempt's number on all workers.
        log_dir: a directory for files ``tower<index>.out`` and ``.err`` of the other towers. None: no files. The files
            of later attempts have the attempt's number in their names.
    """

    def __init__(self, relay: console.Relay, attempt: Attempt, rendezvous: Rendezvous, log_dir: str | None) -> None:
        super().__init__(log_dir=log_dir)
        self._relay, self._attempt, self._rendezvous = relay, attempt, rendezvous

    @property
    def root_log_dir(self) -> str:
        return self._root_log_dir or os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Returns every stream's destination, for the towers with these environments (by local index)."""
        folder = pathlib.Path(self._root_log_dir) if self._root_log_dir else None
        if folder:
            folder.mkdir(parents=True, exist_ok=True)
        stdouts, stderrs = {0: ""}, {0: ""}  # unchanged: the terminal
        number = self._rendezvous.attempt
        for local, variables in envs.items():
            tower = int(variables["RANK"])
            variables.update(self._attempt.file_variables(tower), TORCHELASTIC_RESTART_COUNT=str(number))
            if local > 0:
                name = f"tower{tower}.attempt{number}" if number else f"tower{tower}"
                stdouts[local] = str(folder / f"{name}.out") if folder else os.devnull
                copy = folder / f"{name}.err" if folder else None
                stderrs[local] = self._relay.prefixed("stderr", f"tower {tower}", copy)
        # Torch would end with an error if a report had another form.
        return LogsDest(stdouts=stdouts, stderrs=stderrs, error_files=dict.fromkeys(envs, ""))


class Supervisor(LocalElasticAgent):
    """Runs one attempt's towers of one worker, through the methods that torch's documentation leaves to subclasses.

    Args:
        spec, logs: arguments of torchrun's agent.
    """

    def __init__(self, attempt: Attempt, spec: WorkerSpec, logs: LogsSpecs) -> None:
        super().__init__(spec, logs)
        self._attempt = attempt

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # Signals that this process ignored from its start (nohup), and continues to ignore.
        ignored = {number for number in _FORWARDED | {signal.SIGQUIT} if signal.getsignal(number) == signal.SIG_IGN}
        started: dict[int, int] = super()._start_workers(worker_group)  # fork_towers has replaced its Popen
        # The call above has installed torch's handlers for all of these, which end the towers at once.
        for number in ignored:
            signal.signal(number, signal.SIG_IGN)
        self._attempt.processes = {worker_group.workers[local].global_rank: started[local] for local in started}
        self._attempt.forward(_FORWARDED - ignored)
        signal.signal(signal.SIGTSTP, self._suspend)
        workers = worker_group.group_world_size or 1
        self._attempt.broadcast.listen(worker_group.store, worker_group.group_rank or 0, workers)
        return started

    def _suspend(self, _number: int, _frame: object) -> None:
        """Suspends the towers when this agent is suspended (Ctrl-Z), and continues them when it continues.

        torchrun's agent gives every tower its own session, which the terminal's stop signal does not reach.
        """
        if self._attempt.living():
            self._attempt.send(signal.SIGSTOP, groups=True)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        try:
            os.kill(os.getpid(), signal.SIGTSTP)  # returns when this process is continued
        finally:  # another signal may have arrived with the one that continues
            signal.signal(signal.SIGTSTP, self._suspend)
            if self._attempt.living():
                self._attempt.send(signal.SIGCONT, groups=True)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._attempt.wait()
        self._attempt.end()
        result: RunResult = super()._monitor_workers(worker_group)  # all towers have ended
        return result

    def _exit_barrier(self) -> None:
        """Does nothing, because :mod:`towers.launching.supervising.attempt` waits for the other workers."""

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        if self._attempt.living():
            self._attempt.end(death_sig, save=False)
        super()._shutdown(death_sig)


def _stop(number: int, _frame: object) -> NoReturn:
    """Handles a signal to this process while there are no towers, as torch's agent does while there are towers."""
    raise SignalException(f"got {signal.Signals(number).name}", signal.Signals(number))


def _die_by(number: int) -> NoReturn:
    """Ends this process by the signal that ended the job, so that the shell reports the same as for one process."""
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    raise SystemExit(128 + number)
