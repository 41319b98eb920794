"""One attempt at a job: the towers that one process has started, their files, their end, and the report.

[Note: mirrored ends the towers] The agent, ``launch`` and ``mirrored cluster`` start processes in different ways, but
supervise them in one way. The agent's towers are started by :mod:`torch.distributed.elastic`. Left to itself, it ends
the other towers as soon as one has failed, and kills them at the first signal. It waits 30 seconds for towers that
handle SIGTERM or are stopped, and treats exit code 75 of one tower as a failure. ``mirrored`` does this instead:

- The first SIGTERM, SIGINT or SIGHUP is forwarded only to the towers, not to processes that they have started: a tower
  whose data loader dies could not finish its step. Towers that handle the signal continue until they have saved. If a
  tower dies of the signal, the others are ended, too. A second signal ends all towers at once.
- SIGUSR1 and SIGUSR2 are forwarded each time to the towers that handle them. If no tower does, they end this process,
  as they would end the script.
- A tower that ends with :data:`towers.health.failure.EXIT_PREEMPTED` has agreed on it with the other towers, which get
  time to do the same.
- A failure on another worker ends the towers of this one.
- A tower that is writing a checkpoint when the job fails gets :data:`towers.health.failure.SAVING_SECONDS` for it.
- After that, the remaining towers receive a signal to end, and are killed :data:`LAST_WORDS` seconds later.

The exit codes of towers are read without collecting them (``waitid``, ``WNOWAIT``), so torch can still collect them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable
from types import FrameType

from torch.distributed import Store

from towers.health.failure import EXIT_PREEMPTED, SAVING_SECONDS, FailureReport, report_path, signal_name
from towers.health.status import Status, StatusRecord, record_path
from towers.launching import console
from towers.launching.job import Job
from towers.system.messages import get_logger, name_towers
from towers.system.timeouts import Deadline, wait_until
from towers.topology import ERROR_FILE, STATUS_RECORD

_OTHER_WORKERS = 300.0  # seconds to wait for the other workers to end, after this one
_OTHERS_TOGETHER = 15.0  # the same if this worker's towers were preempted
log = get_logger("towers")

LAST_WORDS = 1.5
"""Seconds between the signal that ends a tower and SIGKILL."""

USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals that mean what the script makes of them; SLURM sends SIGUSR1 before it preempts a job, if it was asked to."""

_TOGETHER = 5.0  # seconds for preempted towers to end, after the first of them


@dataclasses.dataclass(frozen=True)
class Failed:
    """A failure of a job, as workers tell each other.

    Attributes:
        sentence: which tower has failed, when and how.
        kind: equal for the same failure of another tower: an exception and its place. Other ends have the sentence.
    """

    sentence: str
    kind: str


@dataclasses.dataclass(frozen=True)
class Ending:
    """How an attempt has ended.

    Attributes:
        code: the exit code, negative for the signal that ended the job.
        text: the message that is printed last.
        failed: the first failure of all workers; None if there is none.
    """

    code: int
    text: str = ""
    failed: Failed | None = None


class Broadcast:
    """The messages between the workers of a job about its end. This base class, for a single worker, sends none.

    Attributes:
        received: the failure that was published first, once it has been received.
    """

    received: Failed | None = None

    def listen(self, store: Store | None, worker: int, workers: int) -> None:
        """Listens from now on.

        Args:
            store: the agents' own, of this attempt.
            worker, workers: the index of this worker, and the number of workers.
        """

    def first_failure(self, failed: Failed | None) -> Failed | None:
        """Returns the failure that was published first, by this worker or another one.

        Args:
            failed: this worker's. None: it has failed only because of another one.
        """
        return failed

    def await_ends(self, sentence: str, seconds: float) -> None:
        """Waits until the towers of all workers have ended well, or something has failed.

        Args:
            sentence: reports to the others that this worker's towers have ended well, and the last position of the
                first.
        """

    def leave(self) -> None:
        """Waits briefly until all workers have read how the job has ended, if this worker serves the store."""


class Attempt:
    """Towers that run together, from their start to their end; see [Note: mirrored ends the towers].

    Each attempt at a job has its own number, directory and keys of the agents' store. It finds no data of another
    attempt.

    Attributes:
        directory: contains the towers' reports and status records.
        broadcast: the messages between the workers.
        processes: ids of the towers' processes, by index of the tower.
        endings: exit codes of the towers that ended by themselves, by index. A negative code is the signal that ended
            the tower. Towers that :meth:`end` kills are not included.
        forwarded: the signal that this process has received and forwarded, or None.

    Args:
        directory: private to the process that starts the towers.
        number: counts the attempts at the job.
        broadcast: sends messages to the other workers, if there are any.
        grace: seconds for the other towers to end by themselves, after one has failed.
        groups: whether every tower has its own process group, which signals can reach.
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
        """Returns environment variables with the files that a tower writes for this process."""
        files = {ERROR_FILE: report_path(self.directory, tower), STATUS_RECORD: record_path(self.directory, tower)}
        return {name: str(path) for name, path in files.items()}

    def report_of(self, tower: int) -> FailureReport | None:
        """Returns the failure report that a tower has written, or None if there is none."""
        return FailureReport.read(report_path(self.directory, tower))

    def status_of(self, tower: int) -> Status | None:
        """Returns a tower's current or last status, or None before its strategy was created."""
        record = StatusRecord.find(self.directory, tower)
        return None if record is None else record.read()

    def exit_code_of(self, tower: int) -> int | None:
        """Returns a tower's exit code, without collecting its process, or None while it runs. An unknown one is 1."""
        try:
            ending = os.waitid(os.P_PID, self.processes[tower], os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # something else has collected it
            return 1
        if ending is None:
            return None
        return ending.si_status if ending.si_code == os.CLD_EXITED else -ending.si_status

    def living(self) -> list[int]:
        """Returns the towers whose processes still run."""
        return [tower for tower in self.processes if self.exit_code_of(tower) is None]

    def note_endings(self) -> bool:
        """Stores the exit codes of towers that have ended by themselves, and returns whether all towers have ended."""
        for tower in self.processes:
            if tower not in self.endings and (code := self.exit_code_of(tower)) is not None:
                self.endings[tower] = code
        return len(self.endings) == len(self.processes)

    @property
    def failed(self) -> bool:
        """Whether a tower has ended by itself with an exit code other than 0 and :data:`EXIT_PREEMPTED`."""
        return not set(self.endings.values()) <= {0, EXIT_PREEMPTED}

    @property
    def preempted(self) -> bool:
        """Whether towers have saved and ended, and none has failed."""
        return EXIT_PREEMPTED in self.endings.values() and not self.failed

    @property
    def died_of_forwarded(self) -> signal.Signals | None:
        """The forwarded signal, if a tower has died of it, or ended with a shell's exit code for it; otherwise None."""
        number = self.forwarded
        return number if number is not None and {-number, 128 + number} & set(self.endings.values()) else None

    def send(self, number: int, *, groups: bool = False) -> None:
        """Sends a signal to the towers that run.

        Args:
            groups: sends it also to all processes that running and ended towers have started, if towers have process
                groups.
        """
        groups = groups and self._groups
        for tower in self.processes if groups else self.living():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                (os.killpg if groups else os.kill)(self.processes[tower], number)

    def forward(self, numbers: Iterable[int]) -> Callable[[], None]:
        """Forwards the first of these signals to the running towers. After it, these signals are handled as before.

        Until then, :data:`USER_SIGNALS` are forwarded to the towers that handle them.

        Returns:
            A function that restores the previous handlers in any case.
        """
        before = {number: signal.getsignal(number) for number in numbers}
        users = unhandled(*USER_SIGNALS)
        before |= dict.fromkeys(users, signal.SIG_DFL)

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
            signal.signal(number, self._forward_to_handlers if number in users else forward)
        return restore

    def _forward_to_handlers(self, number: int, _frame: FrameType | None) -> None:
        if not (processes := [self.processes[tower] for tower in self.living()]):
            return
        if not (handling := [process for process in processes if _handles(process, number)]):
            signal.signal(number, signal.SIG_DFL)
            handling = [os.getpid()]
        for process in handling:
            os.kill(process, number)

    def wait(self, seconds: float = math.inf) -> None:
        """Waits until a tower has failed, another worker's failure has arrived, or all towers have ended.

        After a failure, it waits up to ``grace`` seconds more for the other towers; the agent's ``grace`` is 0.
        """
        deadline = Deadline(seconds)
        wait_until(self._is_over, seconds)
        if self.preempted:
            wait_until(lambda: self.note_endings() or self.failed, self._grace or _TOGETHER)
            return
        number = self.died_of_forwarded
        grace = self._grace if number is None else LAST_WORDS  # all towers have received it, and need no other signal
        wait_until(self.note_endings, min(grace, deadline.remaining()))
        if number is not None and self._groups:
            self.send(number, groups=True)  # for processes that ended towers had started

    def _is_over(self) -> bool:
        return self.note_endings() or any(self.endings.values()) or bool(self.broadcast.received)

    def end(self, number: int = signal.SIGTERM, *, save: bool = True) -> None:
        """Ends the towers that run, and the processes that failed towers have started.

        Args:
            number: the first signal; SIGKILL follows.
            save: whether towers that are writing a checkpoint get time to finish it.
        """
        if save:
            self._let_save()
        if not self.failed and not self.living():
            return
        for numbers in ((number, signal.SIGCONT), (signal.SIGKILL,)):  # a stopped process handles it when it continues
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


def _is_of_attempt(handler: object) -> bool:
    """Returns whether a handler forwards a signal to towers, perhaps to those of an earlier attempt."""
    return isinstance(getattr(handler, "__self__", None), Attempt)


def _handles(process: int, number: int) -> bool:
    """Returns whether a process has a handler for a signal, as far as this system tells."""
    with contextlib.suppress(OSError):
        status = pathlib.Path(f"/proc/{process}/status").read_text()
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
        return bool(int(caught.split()[1], 16) >> (number - 1) & 1)
    return False


def see_children_end() -> None:
    """Makes the exit codes of child processes readable, even if this process was started with SIGCHLD ignored."""
    if signal.getsignal(signal.SIGCHLD) == signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def unhandled(*numbers: int) -> list[int]:
    """Returns those of these signals that the program does not handle; none outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return []
    handlers = {each: signal.getsignal(each) for each in numbers}
    defaults = (signal.SIG_DFL, signal.default_int_handler)
    return [each for each, handler in handlers.items() if handler in defaults or _is_of_attempt(handler)]


def ending_of(job: Job, attempt: Attempt) -> Ending:
    """Returns how an attempt ended. If this worker's towers ended well, waits for those of the other workers first."""
    if attempt.died_of_forwarded is not None:
        return Ending(-attempt.died_of_forwarded)
    if not attempt.failed and len(attempt.endings) == job.towers:
        if (sentence := _first_good_end(job, attempt)) is not None:
            attempt.broadcast.await_ends(sentence, _OTHERS_TOGETHER if attempt.preempted else _OTHER_WORKERS)
        if attempt.broadcast.received is None:
            return Ending(EXIT_PREEMPTED, _preempted(attempt)) if attempt.preempted else Ending(0)
    return _failure(job, attempt)


def _preempted(attempt: Attempt) -> str:
    tower = min(tower for tower, code in attempt.endings.items() if code == EXIT_PREEMPTED)
    by = f" by {attempt.forwarded.name}" if attempt.forwarded is not None else ""
    return f"mirrored: preempted{by}: the towers ended {_status(attempt, tower)}, with exit code {EXIT_PREEMPTED}"


def _failure(job: Job, attempt: Attempt) -> Ending:
    codes = {tower: code for tower, code in attempt.endings.items() if code}
    if not codes:
        received = attempt.broadcast.received
        assert received is not None  # no tower of this worker has failed
        return Ending(1, f"mirrored: {received.sentence}", received)
    reports = {tower: attempt.report_of(tower) for tower in codes}
    for tower, report in reports.items():
        log.debug("tower %d ended with %d; its report: %s", tower, codes[tower], report.short if report else "none")
    first = min(codes, key=lambda tower: (its.consequence, its.time) if (its := reports[tower]) else (False, math.inf))
    report, code = reports[first], codes[first]
    name, status = _name(job, first), _status(attempt, first)
    lines = []
    if report is not None:
        lines.append(f"mirrored: tower {first} failed:\n{report.trace.rstrip()}")
        kind = f"{status}: {report.short}"
        sentence = f"{name} failed {kind}"
    elif code < 0:
        kind = sentence = f"{name} was ended by {signal_name(-code)} {status}"
    else:
        alone = ", and others did not, so nothing was saved together" if code == EXIT_PREEMPTED else ""
        kind = sentence = f"{name} ended with exit code {code} {status}{alone}"
    lines.append(f"mirrored: {sentence}")
    failed = Failed(sentence, kind)
    # A tower that only reports the loss of another is not the root cause, but a tower that ended well may be.
    is_consequence = report is not None and report.consequence
    good = _first_good_end(job, attempt) if is_consequence else None
    own = failed if not is_consequence else None if good is None else Failed(good, good)
    cause = attempt.broadcast.first_failure(own) or failed
    if cause.sentence != sentence:
        lines.append(f"mirrored: root cause: {cause.sentence}")
    return Ending(1 if code == EXIT_PREEMPTED else code if code > 0 else 128 - code, "\n".join(lines), cause)


def _first_good_end(job: Job, attempt: Attempt) -> str | None:
    """Returns a sentence on the first tower that ended without a failure, and its last status; None if all failed."""
    for tower, code in attempt.endings.items():
        if code in (0, EXIT_PREEMPTED):
            status = attempt.status_of(tower)
            call = ""
            if code == 0 and status is not None and status.is_between_runs:
                call = " and made a call that it did not make: look for one under `if strategy.is_chief:`"
            end = f"ended with exit code {code} {_status(attempt, tower)}"
            return f"{_name(job, tower)} {end}, while others continued{call}"
    return None


def _name(job: Job, tower: int) -> str:
    """Returns the tower's name, with its worker if there are several."""
    host = f" on {socket.gethostname()} (worker {job.worker})" if job.workers > 1 else ""
    return f"tower {tower}{host}"


def _status(attempt: Attempt, tower: int) -> str:
    """Returns a tower's last status, as part of a sentence."""
    status = attempt.status_of(tower)
    return "before its strategy was made" if status is None else str(status)
