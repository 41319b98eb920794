"""torchrun's agent with another end: what happens when a tower ends, and when the job is told to.

[Note: how towers end is ours] :mod:`torch.distributed.elastic` starts the towers and collects them. It ends the others
as soon as one has failed, kills them at the first signal, waits 30 seconds for those that handle SIGTERM or are
stopped, and takes exit code 75 of one tower for a failure. Here, in the methods that its documentation leaves to
subclasses:

- After a failure the others are asked to end, and killed :data:`LAST_WORDS` seconds later.
- A tower that ends with :data:`towers.health.failure.EXIT_PREEMPTED` has agreed on it with the others, which get the
  time to.
- The first SIGTERM, SIGINT or SIGHUP is forwarded to the towers alone, not to processes that they have started: a tower
  whose data loader dies could not end its step. Towers that handle it go on until they have saved; one that dies of it
  takes the others along. A second one ends all at once.
- A failure on another worker ends the towers of this one.
- A tower that is writing a checkpoint when the job fails gets :data:`towers.health.failure.SAVING_SECONDS` for it.
- A worker whose towers have ended well waits for the others', so that all workers say how the job has ended.

The exit codes of towers are read without collecting them (``waitid``, ``WNOWAIT``), so torch still finds all it
expects.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.elastic.agent.server import WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs, SignalException

from towers.health.failure import EXIT_PREEMPTED, SAVING_SECONDS
from towers.health.status import StatusRecord
from towers.launching import console, processes
from towers.launching.failure_broadcast import FailureBroadcast
from towers.launching.job import Job
from towers.system.text import name_towers
from towers.system.timeouts import wait_until

LAST_WORDS = 1.5
"""Seconds between asking a tower to end and killing it."""

_TOGETHER = 5.0  # seconds in which towers that were preempted end, after the first of them
_OTHER_WORKERS = 300.0  # seconds in which the other workers end, after this one
_OTHERS_TOGETHER = 15.0  # the same where the towers of this one were preempted
_FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Supervisor(LocalElasticAgent):
    """Runs the towers of one worker; see [Note: how towers end is ours].

    Attributes:
        forwarded: the signal that this process was sent and has forwarded, if there was one.
        endings: exit codes of the towers that ended by themselves, by index; negative: the signal they died of.
        failed_elsewhere: what another worker says has failed first.
        broadcast: what workers tell each other.
        directory: with the towers' reports and status records.
        job: the towers of this worker.

    Args:
        spec, logs: as of torchrun's agent.
    """

    def __init__(
        self, job: Job, spec: WorkerSpec, logs: LogsSpecs, broadcast: FailureBroadcast, directory: os.PathLike[str]
    ) -> None:
        super().__init__(spec, logs)
        self.forwarded: signal.Signals | None = None
        self.endings: dict[int, int] = {}
        self.failed_elsewhere: str | None = None
        self.broadcast = broadcast
        self.directory = directory
        self.job = job
        # Signals that this process was started to ignore (nohup), and goes on to.
        ending = (*_FORWARDED, signal.SIGQUIT)
        self._ignored = [number for number in ending if signal.getsignal(number) == signal.SIG_IGN]
        self._processes: dict[int, int] = {}  # by index of the tower

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started: dict[int, int] = super()._start_workers(worker_group)
        self._processes = {worker_group.workers[local].global_rank: started[local] for local in started}
        # torch has installed handlers of its own meanwhile, for all of these.
        handlers = dict.fromkeys(_FORWARDED, self._forward) | dict.fromkeys(self._ignored, signal.SIG_IGN)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        signal.signal(signal.SIGTSTP, self._suspend)
        self.broadcast.listen(worker_group.store, worker_group.group_rank or 0, worker_group.group_world_size or 1)
        return started

    def _forward(self, number: int, _frame: object) -> None:
        received = signal.Signals(number)
        if received == signal.SIGHUP:
            console.leave_terminal()
        if self.forwarded is not None or not self._living():
            raise SignalException(f"{received.name} came again", received)
        self.forwarded = received
        processes.send(number, self._living().values())

    def _suspend(self, _number: int, _frame: object) -> None:
        """When this agent is suspended (Ctrl-Z), suspend its towers; when it goes on, let them go on.

        torchrun's agent gives every tower a session of its own, which the terminal's stop signal does not reach.
        """
        towers = self._living().values()
        processes.send(signal.SIGSTOP, towers, groups=True)
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        try:
            os.kill(os.getpid(), signal.SIGTSTP)  # returns when this process is continued
        finally:  # another signal may have come with the one that continues
            signal.signal(signal.SIGTSTP, self._suspend)
            processes.send(signal.SIGCONT, towers, groups=True)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._note_endings()
        codes = set(self.endings.values())
        if codes - {0, EXIT_PREEMPTED}:
            if self.forwarded is not None and codes & died_of(self.forwarded):
                self._await(LAST_WORDS)  # all have been sent the signal, and need no other
                self._send(self.forwarded)  # but for what those that have ended had started
            self._let_save()
            self._end_all(signal.SIGTERM)
        elif EXIT_PREEMPTED in codes:
            self._await(_TOGETHER, lambda codes: bool(codes - {0, EXIT_PREEMPTED}))
            self._let_save(note=True)
            if self._living():
                self._end_all(signal.SIGTERM)
            elif set(self.endings.values()) <= {0, EXIT_PREEMPTED}:
                self._leave_with_others(_OTHERS_TOGETHER)
        elif self._living() and self.broadcast.received is not None:
            self.failed_elsewhere = self.broadcast.received
            self._let_save()
            self._end_all(signal.SIGTERM)
        elif len(self.endings) < len(self._processes):
            return RunResult(state=WorkerState.HEALTHY)
        result: RunResult = super()._monitor_workers(worker_group)  # all of them have ended
        return result

    def _exit_barrier(self) -> None:
        self._leave_with_others(_OTHER_WORKERS)

    def _leave_with_others(self, seconds: float) -> None:
        """When the towers of this worker have ended well: wait for those of the others, or receive their failure."""
        if (sentence := self.first_good_end()) is not None:
            self.broadcast.publish_end(sentence)
            self.broadcast.await_ends(seconds)
            self.failed_elsewhere = self.broadcast.received

    def first_good_end(self) -> str | None:
        """Which tower was the first to end without failing, and what it did last; for those that went on."""
        for tower, code in self.endings.items():
            if code in (0, EXIT_PREEMPTED):
                record = StatusRecord.find(self.directory, tower)
                whole = code == 0 and record is not None and record.read().is_between_runs
                call = ""
                if whole:
                    call = " and made a call that it did not make: look for one under `if strategy.is_chief:`"
                status = self.status_of(tower)
                return f"{self.name_of(tower)} ended with exit code {code} {status}, while others went on{call}"
        return None

    def name_of(self, tower: int) -> str:
        """The tower, and of several workers which one it is on."""
        host = f" on {socket.gethostname()} (worker {self.job.worker})" if self.job.workers > 1 else ""
        return f"tower {tower}{host}"

    def status_of(self, tower: int) -> str:
        """What a tower did last, as part of a sentence."""
        record = StatusRecord.find(self.directory, tower)
        return str(record.read()) if record is not None else "before its strategy was made"

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *args: Any, **kwargs: Any) -> None:
        if self._living():
            self._end_all(death_sig)
        super()._shutdown(death_sig)

    def _let_save(self, *, note: bool = False) -> None:
        """Give towers that are writing a checkpoint the time to.

        Args:
            note: as of :meth:`_await`.
        """

        def saving() -> list[int]:
            return processes.towers_saving(self.directory, self._living())

        if towers := saving():
            print(
                f"towers: {name_towers(towers)} may take {SAVING_SECONDS:.0f} s for the checkpoint under way",
                file=sys.stderr,
                flush=True,
            )
            self._await(SAVING_SECONDS, lambda codes: not saving(), note=note)

    def _end_all(self, number: signal.Signals) -> None:
        """End the towers and what they have started."""
        processes.end(self._send, lambda: not self._living(), LAST_WORDS, number)

    def _send(self, number: int) -> None:
        """Signal the towers and the processes that they have started."""
        processes.send(number, self._processes.values(), groups=True)

    def _await(
        self, seconds: float, enough: Callable[[set[int]], bool] = lambda codes: False, *, note: bool = True
    ) -> None:
        """Wait until no tower lives, or until the exit codes that there are are ``enough``.

        Args:
            note: towers that end meanwhile have ended by themselves.
        """

        def done() -> bool:
            if note:
                self._note_endings()
            return not self._living() or enough(set(self.endings.values()))

        wait_until(done, seconds)

    def _note_endings(self) -> None:
        """Towers that have ended by now have ended by themselves."""
        for tower, code in self._ended().items():
            self.endings.setdefault(tower, code)

    def _living(self) -> dict[int, int]:
        ended = self._ended()
        return {tower: process for tower, process in self._processes.items() if tower not in ended}

    def _ended(self) -> Mapping[int, int]:
        """Exit codes of the towers that have ended, which are left for torch to collect."""
        return {tower: code for tower, process in self._processes.items() if (code := _exit_code(process)) is not None}


def died_of(number: signal.Signals) -> frozenset[int]:
    """Exit codes of a program that ended because of a signal: by it, or as a shell would say it."""
    return frozenset({-number, 128 + number})


def _exit_code(process: int) -> int | None:
    try:
        ending = os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # torch has collected it
        return 0
    if ending is None:
        return None
    return ending.si_status if ending.si_code == os.CLD_EXITED else -ending.si_status
