"""torchrun's agent with our way of ending: what happens when a tower ends, and when the job is told to.

:mod:`torch.distributed.elastic` starts the towers and collects them. It ends the others as soon as one has failed, and
then waits 30 seconds for those that handle SIGTERM, or are stopped. Here, in the methods that its documentation
leaves to subclasses:

- After a failure the others are asked to end, and killed :data:`LAST_WORDS` seconds later.
- A tower that ends with :data:`towers.health.failure.EXIT_PREEMPTED` has agreed on it with the others, which get the
  time to.
- The first SIGTERM, SIGINT or SIGHUP is passed on to the towers. Those that handle it go on until they have saved; one
  that dies of it takes the others along. A second one ends all at once.
- A failure on another worker ends the towers of this one.
- A tower that is writing a checkpoint when the job fails gets :data:`towers.health.failure.SAVING_SECONDS` for it.
- A worker whose towers have ended well waits for the others', so that all workers say how the job has ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch.distributed.elastic.agent.server import WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.api import RunResult
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import SignalException

from towers.health import status_record
from towers.health.failure import EXIT_PREEMPTED, SAVING_SECONDS
from towers.launching import console
from towers.launching.agent_logs import TowerLogs
from towers.launching.failure_broadcast import News
from towers.mirroring.equality import name_towers

LAST_WORDS = 1.5
"""Seconds between asking a tower to end and killing it."""

_TOGETHER = 5.0  # seconds in which towers that were preempted end, after the first of them
_OTHER_WORKERS = 300.0  # seconds in which the other workers end, after this one
_OTHERS_TOGETHER = 15.0  # the same where the towers of this one were preempted
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_FATAL = (signal.SIGQUIT,)


class Supervisor(LocalElasticAgent):
    """Runs the towers of one worker.

    Attributes:
        told: the signal that this process was sent and has passed on, if it was.
        endings: exit codes of the towers that ended by themselves, by index; negative: the signal they died of.
        elsewhere: what another worker says has failed first.

    Args:
        spec, logs: as of torchrun's agent.
        ignored: signals that whoever started this process had it ignore.
        news: what workers tell each other.
        ended_well: says for the other workers which tower was the first to end without failing, of exit codes.
        records: the directory of the towers' whereabouts.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs: TowerLogs,
        ignored: frozenset[signal.Signals],
        news: News,
        ended_well: Callable[[Mapping[int, int]], str | None],
        records: os.PathLike[str],
    ) -> None:
        super().__init__(spec, logs)
        self._ended_well = ended_well
        self._records = records
        self.told: signal.Signals | None = None
        self.endings: dict[int, int] = {}
        self.elsewhere: str | None = None
        self._ignored = ignored
        self._news = news
        self._processes: dict[int, int] = {}  # by index of the tower

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started: dict[int, int] = super()._start_workers(worker_group)
        self._processes = {worker_group.workers[local].global_rank: started[local] for local in started}
        # torch has installed handlers of its own meanwhile, for all of these.
        for number in _PASSED_ON:
            signal.signal(number, signal.SIG_IGN if number in self._ignored else self._told)
        for number in _FATAL:
            if number in self._ignored:
                signal.signal(number, signal.SIG_IGN)
        self._news.listen(worker_group.store, worker_group.group_rank or 0, worker_group.group_world_size or 1)
        return started

    def _told(self, number: int, _frame: object) -> None:
        told = signal.Signals(number)
        if told == signal.SIGHUP:
            console.leave_terminal()
        if self.told is None and self._living():
            self.told = told
            # Not what they have started, such as loaders, which they still need.
            for process in self._living().values():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, number)
            return
        raise SignalException(f"{told.name} came again", told)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        for tower, code in self._ended().items():
            self.endings.setdefault(tower, code)
        codes = set(self.endings.values())
        if codes - {0, EXIT_PREEMPTED}:
            if self.told is not None and codes & died_of(self.told):
                self._await(LAST_WORDS)  # all were told, and need not be told again
                self._send(self.told, self._processes)  # but for what those that have ended had started
            self._let_save()
            self._end_all(signal.SIGTERM)
        elif EXIT_PREEMPTED in codes:
            self._await(_TOGETHER, lambda codes: bool(codes - {0, EXIT_PREEMPTED}))
            self._let_save(note=True)
            if self._living():
                self._end_all(signal.SIGTERM)
            elif set(self.endings.values()) <= {0, EXIT_PREEMPTED}:
                self._leave_with_others(_OTHERS_TOGETHER)
        elif self._living() and (said := self._news.heard) is not None:
            self.elsewhere = said
            self._let_save()
            self._end_all(signal.SIGTERM)
        elif len(self.endings) < len(self._processes):
            return RunResult(state=WorkerState.HEALTHY)
        found: RunResult = super()._monitor_workers(worker_group)  # all of them have ended
        return found

    def _exit_barrier(self) -> None:
        self._leave_with_others(_OTHER_WORKERS)

    def _leave_with_others(self, seconds: float) -> None:
        """When the towers of this worker have ended well: wait for those of the others, or hear of their failure."""
        if (sentence := self._ended_well(self.endings)) is not None:
            self._news.say_ended(sentence)
            self._news.await_ends(seconds)
            self.elsewhere = self._news.heard

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
            records = {tower: status_record.find(self._records, tower) for tower in self._living()}
            return [tower for tower, record in records.items() if record is not None and record.saves]

        if towers := saving():
            print(
                f"towers: {name_towers(towers)} may take {SAVING_SECONDS:.0f} s for the checkpoint under way",
                file=sys.stderr,
                flush=True,
            )
            self._await(SAVING_SECONDS, lambda codes: not saving(), note=note)

    def _end_all(self, number: signal.Signals) -> None:
        """End the towers and what they have started."""
        for each in (number, signal.SIGCONT):  # one that is stopped hears it when it goes on
            self._send(each, self._processes)
        self._await(LAST_WORDS, note=False)
        self._send(signal.SIGKILL, self._processes)
        self._await(LAST_WORDS, note=False)

    def _await(
        self, seconds: float, enough: Callable[[set[int]], bool] = lambda codes: False, *, note: bool = True
    ) -> None:
        """Wait until no tower lives, or until the exit codes that are there are ``enough``.

        Args:
            note: towers that end meanwhile have ended by themselves.
        """
        end = time.monotonic() + seconds
        while self._living() and time.monotonic() < end and not enough(set(self.endings.values())):
            time.sleep(0.02)
            if note:
                for tower, code in self._ended().items():
                    self.endings.setdefault(tower, code)

    @staticmethod
    def _send(number: signal.Signals, processes: Mapping[int, int]) -> None:
        """Signal towers and the processes that they have started."""
        for process in processes.values():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process, number)

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
        found = os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # torch has collected it
        return 0
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
