"""One attempt at a job: the towers that one process has started, what they leave in files, and how they end.

[Note: how towers end is ours] The agent, ``launch`` and ``mirrored cluster`` start processes in ways of their own, and
supervise them in one way. :mod:`torch.distributed.elastic`, which the agent's towers come from, ends the others as soon
as one has failed, kills them at the first signal, waits 30 seconds for those that handle SIGTERM or are stopped, and
takes exit code 75 of one tower for a failure. Here

- the first SIGTERM, SIGINT or SIGHUP is forwarded to the towers alone, not to processes that they have started: a tower
  whose data loader dies could not end its step. Towers that handle it go on until they have saved; one that dies of it
  takes the others along. A second one ends all at once.
- A tower that ends with :data:`towers.health.failure.EXIT_PREEMPTED` has agreed on it with the others, which get the
  time to.
- A failure on another worker ends the towers of this one.
- A tower that is writing a checkpoint when the job fails gets :data:`towers.health.failure.SAVING_SECONDS` for it.
- After that the others are asked to end, and killed :data:`LAST_WORDS` seconds later.

The exit codes of towers are read without collecting them (``waitid``, ``WNOWAIT``), so torch still finds all it
expects.
"""

from __future__ import annotations

import contextlib
import math
import os
import pathlib
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType

from torch.distributed import Store

from towers.health.failure import EXIT_PREEMPTED, SAVING_SECONDS, FailureReport, report_path
from towers.health.peers import Status
from towers.health.status import StatusRecord, record_path
from towers.launching import console
from towers.system.text import name_towers
from towers.system.timeouts import Deadline, wait_until
from towers.topology import ERROR_FILE, STATUS_RECORD

LAST_WORDS = 1.5
"""Seconds between asking a tower to end and killing it."""

_TOGETHER = 5.0  # seconds in which towers that were preempted end, after the first of them


class Broadcast:
    """What the workers of a job tell each other of its end. One worker alone tells nobody, as here.

    Attributes:
        received: the failure that was published first, once it has been received.
    """

    received: str | None = None

    def listen(self, store: Store | None, worker: int, workers: int) -> None:
        """Listen from now on.

        Args:
            store: the agents' own, of this attempt.
            worker, workers: this one, and how many there are.
        """

    def first_failure(self, sentence: str | None) -> str | None:
        """What was published first of all, by this worker or another one.

        Args:
            sentence: tells the others what has failed here; None: only what another worker brought about.
        """
        return sentence

    def await_ends(self, sentence: str, seconds: float) -> None:
        """Wait until the towers of all workers have ended well, or something has failed.

        Args:
            sentence: tells the others that the towers of this worker have, and what the first of them did last.
        """

    def leave(self) -> None:
        """Where this worker serves the store, wait for a moment until all know how the job has ended."""


class Attempt:
    """Towers that run together, from their start to their end; see [Note: how towers end is ours].

    Each attempt at a job has a number, a directory and keys of the agents' store: it finds nothing of another one.

    Attributes:
        directory: with the towers' reports and status records.
        broadcast: what the workers tell each other.
        processes: ids of the towers' processes, by index of the tower.
        endings: exit codes of the towers that ended by themselves, by index; negative: the signal they died of. Those
            that :meth:`end` kills are not in it.
        forwarded: the signal that this process was sent and has forwarded, if there was one.

    Args:
        directory: private to the process that starts the towers.
        number: counts the attempts at the job.
        broadcast: to the other workers, if there are any.
        grace: seconds that the others get to end by themselves, once one has failed.
        groups: whether every tower has a process group of its own, which signals can reach.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        number: int = 0,
        *,
        broadcast: Broadcast | None = None,
        grace: float = 0.0,
        groups: bool = False,
    ) -> None:
        self.directory = directory / f"attempt{number}"
        self.directory.mkdir()
        self.broadcast = broadcast or Broadcast()
        self.processes: dict[int, int] = {}
        self.endings: dict[int, int] = {}
        self.forwarded: signal.Signals | None = None
        self._grace, self._groups = grace, groups

    def file_variables(self, tower: int) -> dict[str, str]:
        """Environment variables with the files that a tower writes for this process."""
        files = {ERROR_FILE: report_path(self.directory, tower), STATUS_RECORD: record_path(self.directory, tower)}
        return {name: str(path) for name, path in files.items()}

    def report_of(self, tower: int) -> FailureReport | None:
        """Why a tower says that it has failed; None where it says nothing."""
        return FailureReport.read(report_path(self.directory, tower))

    def status_of(self, tower: int) -> Status | None:
        """What a tower does, or did last; None before its strategy was made."""
        record = StatusRecord.find(self.directory, tower)
        return None if record is None else record.read()

    def exit_code_of(self, tower: int) -> int | None:
        """How a tower has ended, without collecting its process; None while it lives."""
        try:
            ending = os.waitid(os.P_PID, self.processes[tower], os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # torch has collected it
            return 0
        if ending is None:
            return None
        return ending.si_status if ending.si_code == os.CLD_EXITED else -ending.si_status

    def living(self) -> list[int]:
        """The towers whose processes still run."""
        return [tower for tower in self.processes if self.exit_code_of(tower) is None]

    def note_endings(self) -> bool:
        """Keep the exit codes of towers that have ended by themselves by now; whether all have."""
        for tower in self.processes:
            if tower not in self.endings and (code := self.exit_code_of(tower)) is not None:
                self.endings[tower] = code
        return len(self.endings) == len(self.processes)

    @property
    def failed(self) -> bool:
        """Whether a tower has ended by itself with another code than 0 and :data:`EXIT_PREEMPTED`."""
        return not set(self.endings.values()) <= {0, EXIT_PREEMPTED}

    @property
    def preempted(self) -> bool:
        """Whether towers have saved and ended, and none has failed."""
        return EXIT_PREEMPTED in self.endings.values() and not self.failed

    @property
    def died_of_forwarded(self) -> signal.Signals | None:
        """The forwarded signal, if a tower has died of it, or has ended with a shell's exit code for that."""
        number = self.forwarded
        return number if number is not None and {-number, 128 + number} & set(self.endings.values()) else None

    def send(self, number: int, *, groups: bool = False) -> None:
        """Send a signal to the towers that live.

        Args:
            groups: also to all that they and those that have ended have started, where towers have process groups.
        """
        groups = groups and self._groups
        for tower in self.processes if groups else self.living():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                (os.killpg if groups else os.kill)(self.processes[tower], number)

    def forward(self, numbers: Iterable[int]) -> Callable[[], None]:
        """Forward the first of these signals to the towers that live; after it all are handled as before.

        Returns:
            a function after which they are in any case.
        """
        before = {number: signal.getsignal(number) for number in numbers}

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        def forward(number: int, _frame: FrameType | None) -> None:
            restore()
            if number == signal.SIGHUP:
                console.leave_terminal()
            if self.living():
                self.forwarded = signal.Signals(number)
                self.send(number)
            else:
                os.kill(os.getpid(), number)

        for number in before:
            signal.signal(number, forward)
        return restore

    def wait(self, seconds: float = math.inf) -> None:
        """Return as soon as a tower has failed or another worker's failure has come, or all have ended.

        After a failure ``grace`` goes by first; the agent's is 0.
        """
        deadline = Deadline(seconds)
        wait_until(self._is_over, seconds)
        if self.preempted:
            wait_until(lambda: self.note_endings() or self.failed, self._grace or _TOGETHER)
            return
        number = self.died_of_forwarded
        grace = self._grace if number is None else LAST_WORDS  # all have been sent it, and need no other signal
        wait_until(self.note_endings, min(grace, deadline.remaining()))
        if number is not None and self._groups:
            self.send(number, groups=True)  # for what those that have ended had started

    def _is_over(self) -> bool:
        return self.note_endings() or any(self.endings.values()) or bool(self.broadcast.received)

    def end(self, number: int = signal.SIGTERM, *, save: bool = True) -> None:
        """End the towers that live, and the processes that failed towers have started.

        Args:
            number: the signal that asks them to.
            save: give those that are writing a checkpoint the time to.
        """
        if save:
            self._let_save()
        if not self.failed and not self.living():
            return
        for numbers in ((number, signal.SIGCONT), (signal.SIGKILL,)):  # a stopped process hears it when it goes on
            for each in numbers:
                self.send(each, groups=True)
            wait_until(lambda: not self.living(), LAST_WORDS)

    def _let_save(self) -> None:
        if towers := self._saving():
            text = f"mirrored: {name_towers(towers)} may take {SAVING_SECONDS:.0f} s for the checkpoint under way"
            print(text, file=sys.stderr, flush=True)
            wait_until(lambda: not self._saving(), SAVING_SECONDS)
        if self.preempted:
            self.note_endings()

    def _saving(self) -> list[int]:
        return [tower for tower in self.living() if (status := self.status_of(tower)) is not None and status.saving]


def unhandled(*numbers: int) -> list[int]:
    """Those of these signals that have Python's handler, or none; none of them outside of the main thread."""
    in_main_thread, default = threading.current_thread() is threading.main_thread(), signal.default_int_handler
    return [each for each in numbers if in_main_thread and signal.getsignal(each) in (signal.SIG_DFL, default)]
