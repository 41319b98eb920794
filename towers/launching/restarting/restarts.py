"""Restarts of towers after a failure: the additional work of the agent of a job with ``restarts``.

[Note: attempts] The agent runs one attempt after the other, each in new processes. It stops when an attempt ends well
or is preempted, when a signal ends the agent itself, or when it gives up. The script restores the newest checkpoint
that all towers have, as after a start by hand. With several workers, the chief's agent decides, and the others follow
it (:mod:`towers.launching.restarting.meeting`).
"""

from __future__ import annotations

import itertools
import os
import pathlib
import signal
import sys
from collections.abc import Callable, Sequence

from torch.distributed.elastic.multiprocessing import SignalException

from towers.errors import StartupError
from towers.health.failure import EXIT_PREEMPTED
from towers.health.status import Status
from towers.launching.job import Job
from towers.launching.restarting.meeting import ChiefRendezvous, FollowerRendezvous, JobEndedError, WorkersRendezvous
from towers.launching.restarting.policy import on_devices_left
from towers.launching.restarting.rendezvous import Rendezvous
from towers.launching.supervising.attempt import Attempt, Ending, Failed
from towers.launching.supervising.failure_broadcast import FailureBroadcast
from towers.system.messages import name_towers
from towers.system.timeouts import Deadline
from towers.topology import DEVICES, MEMORY

_MEMORY_FILES = 8
_STOP_GRACE = 1.0  # seconds: errors of towers that wait for a stopped one arrive first, and contain more


def run_attempts(
    job: Job, token: str, directory: pathlib.Path, run_attempt: Callable[[Job, Attempt, Rendezvous], Ending]
) -> Ending:
    """Runs attempts at a job until one is the last, see [Note: attempts].

    Args:
        token: the job's.
        directory: private to this process.
        run_attempt: runs one attempt to its end.

    Returns:
        The end of the last attempt.
    """
    _offer_memory(directory / "memory")
    several = ChiefRendezvous if job.worker == 0 else FollowerRendezvous
    rendezvous: Rendezvous = several(job, token) if job.addresses else Rendezvous(job, token)
    failures: list[tuple[Failed, int]] = []  # and the step that the attempt reached
    ending, against = Ending(0), ""
    try:
        for number in itertools.count():
            broadcast = FailureBroadcast(token, joinable=job.min_towers is not None)
            attempt = RestartableAttempt(job, directory, number, broadcast, rendezvous)
            part = job
            if number and job.min_towers is not None and job.kind != "cpu" and not job.addresses:
                part = on_devices_left(job)
                os.environ[DEVICES] = ",".join(part.devices)
            ending = run_attempt(part, attempt, rendezvous)
            then = f"restarting all towers ({len(failures) + 1} of {job.restarts} restarts)"
            if ending.code == EXIT_PREEMPTED and attempt.forwarded is None and broadcast.is_joined():
                ending, then = Ending(0, ending.text), "restarting all towers, with a worker that has rejoined"
            elif ending.failed is None or attempt.forwarded is not None:
                break
            elif job.worker > 0:
                then = "worker 0 decides whether all towers restart"
            else:
                failures.append((ending.failed, attempt.step))
                if against := _reason_against(job, attempt, failures):
                    break
            print(f"{ending.text}\nmirrored: {then}", file=sys.stderr, flush=True)
    except JobEndedError as error:
        code = ending.code or error.code  # the failed tower's code, if a tower of this worker has failed
        return Ending(code, f"mirrored: {error}")
    except (StartupError, OSError, SignalException) as error:
        if isinstance(rendezvous, ChiefRendezvous):
            ended = f"worker 0 received {error.sigval.name}" if isinstance(error, SignalException) else error
            rendezvous.end(str(ended), 1, given_up=True)
        raise
    code, text = ending.code, ending.text
    end = text.splitlines()[-1].removeprefix("mirrored: ") if text else "the job has ended"
    if against:
        text, end = f"{text}\nmirrored: not restarted: {against}", f"{end}; not restarted: {against}"
    if isinstance(rendezvous, ChiefRendezvous):
        rendezvous.end(end, code if code >= 0 else 128 - code, given_up=bool(against))
    return Ending(code, text)


def _offer_memory(folder: pathlib.Path) -> None:
    """Lets towers keep bytes in nameless files that last until this process ends, outside of all file systems."""
    if hasattr(os, "memfd_create"):
        folder.mkdir()
        for number in range(_MEMORY_FILES):
            descriptor = os.memfd_create("towers-memory", os.MFD_CLOEXEC)
            (folder / f"file{number}").symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
        os.environ[MEMORY] = str(folder)


class RestartableAttempt(Attempt):
    """An attempt that earlier attempts may precede, and further attempts may follow.

    Its towers save and end when a worker requests to join, so that the next attempt can include it. It fails when the
    agent of a worker is lost.

    [Note: failed towers are killed] A CheckpointManager treats SIGTERM as a request to save after the current step,
    which towers of a failed attempt never finish. So towers that restore the newest checkpoint are killed instead of
    receiving a signal to end. Their exit handlers do not run, as after a SIGTERM that no handler handles.

    [Note: stopped towers] A tower that is stopped (SIGSTOP) fails when the others have waited for it for as long as a
    collective may take. Before it has joined them, or if they are stopped, too, no tower waits: the agent kills it.
    """

    broadcast: FailureBroadcast

    def __init__(
        self, job: Job, directory: pathlib.Path, number: int, broadcast: FailureBroadcast, rendezvous: Rendezvous
    ) -> None:
        super().__init__(directory, number, broadcast=broadcast, groups=True)
        self._rendezvous = rendezvous
        self._stopped = Deadline(job.collective_seconds + _STOP_GRACE, longest=1.0)  # since no tower was
        self._told_to_save = False

    def end(self, number: int = signal.SIGTERM, *, save: bool = True) -> None:
        """Ends the towers, see [Note: failed towers are killed]."""
        super().end(signal.SIGKILL if self.restores and not self.preempted else number, save=save)

    def _is_over(self) -> bool:
        if not (stopped := [tower for tower in self.living() if self._is_stopped(tower)]):
            self._stopped.restart()
        elif self._stopped.has_passed():
            text = f"mirrored: {name_towers(stopped)}: stopped (SIGSTOP) for {self._stopped.seconds:.0f} s, and killed"
            print(text, file=sys.stderr, flush=True)
            for tower in stopped:
                os.kill(self.processes[tower], signal.SIGKILL)
        is_asked = self.broadcast.joins and not self._told_to_save
        if is_asked and sum(status.restores for status in self._statuses()) == len(self.processes):
            self._told_to_save = True
            self.send(signal.SIGTERM)
        return super()._is_over() or self._has_lost_worker()

    def _has_lost_worker(self) -> bool:
        """Returns whether another worker's agent (on the chief) or the chief's agent (on other workers) is lost."""
        lost = self._rendezvous.lost() if isinstance(self._rendezvous, WorkersRendezvous) else ""
        # An agent also ends some minutes after its towers have ended well.
        if not lost or (isinstance(self._rendezvous, ChiefRendezvous) and self.broadcast.ends()):
            return False
        self.broadcast.miss(lost)
        return True

    def _is_stopped(self, tower: int) -> bool:
        """Returns whether a tower that runs, or has just ended, is stopped (SIGSTOP)."""
        state = os.waitid(os.P_PID, self.processes[tower], os.WEXITED | os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
        return state is not None and state.si_code == os.CLD_STOPPED

    @property
    def step(self) -> int:
        """The last step that all towers have reached."""
        return min((status.step for status in self._statuses()), default=0)

    @property
    def restores(self) -> bool:
        """Whether the script restores the newest checkpoint when it is started again."""
        return any(status.restores for status in self._statuses())

    def _statuses(self) -> list[Status]:
        return [status for status in map(self.status_of, self.processes) if status is not None]


def _reason_against(job: Job, attempt: RestartableAttempt, failures: Sequence[tuple[Failed, int]]) -> str:
    """Returns why the towers do not restart after these failures, as part of a sentence; empty if they restart."""
    first, last = failures[0][0].sentence, failures[-1][0].sentence
    first = f"; root cause: {first}" if first != last else ""
    if len(failures) > job.restarts:
        return f"the limit of {job.restarts} restarts is reached{first}"
    last_two = [(failed.kind, step) for failed, step in failures[-2:]]
    if last_two[1:] == last_two[:1]:
        return f"it failed in the same way at the same step as before{first}"
    if job.from_the_start or attempt.restores or not attempt.step:
        return ""
    return (
        f"the script restores no checkpoint, so its {attempt.step} steps would be lost. Let a CheckpointManager "
        f"save and resume them; or pass --from-the-start to mirrored run{first}"
    )
