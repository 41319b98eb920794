"""Ends a test that hangs together with all processes that it started, and shows their stacks and their output.

A test hangs when its processes are idle for long: together they neither used a core nor waited for one. A test that is
slow because the machine is busy is not ended, and one that waits for what never happens is ended within a minute.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import os
import pathlib
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing import active_children
from types import FrameType

import pytest

from tests.support import programs
from tests.support.forks import SERVER
from tests.support.processes import catches, command_of, family, state_of, wanted_seconds

STACKS = "TESTS_STACKS"
"""Names the file to which the Python programs of tests write their stacks when they receive :data:`SHOW_STACKS`."""
SHOW_STACKS = signal.SIGRTMAX - 2

SECONDS, EXTENDED_SECONDS = 60.0, 180.0
"""In which a test that hangs from its start is ended, which may be idle for half of them."""

_BUSY = 0.1  # cores: processes that want fewer are idle
_SAMPLE_SECONDS = 2.0
_LONGEST = int(os.environ.get("TESTS_LONGEST", "10"))  # times the limit: how long processes may be busy
_END_SECONDS = 10.0  # in which the test ends when its processes have been killed
_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of <linux/prctl.h>

_kept: set[int] = set()


def keep_family(process: int) -> None:
    """Lets a process, and all processes that it starts, outlive the test that started it."""
    _kept.add(process)


@contextlib.contextmanager
def orphans_left_to_init() -> Iterator[None]:
    """Lets processes whose parent has ended become children of init, where the guard does not see them."""
    _set_subreaper(False)
    try:
        yield
    finally:
        _set_subreaper(True)


def _set_subreaper(on: bool) -> None:
    """Makes processes whose parent has ended children of this process."""
    ctypes.CDLL(None).prctl(_SUBREAPER, int(on), 0, 0, 0)
    SERVER.adopts = on


class HangError(BaseException):
    """The test was ended because it hangs."""


@dataclasses.dataclass(frozen=True, eq=False)
class _Test:
    """A test, or the time between two.

    Attributes:
        seconds: in which it is ended if it hangs from its start; 0 between tests.
    """

    seconds: float


class Guard:
    """A plugin of pytest that watches the tests of this process, one after another."""

    def __init__(self) -> None:
        _set_subreaper(True)
        descriptor, self._stacks = tempfile.mkstemp(prefix="tests-stacks-")
        os.close(descriptor)
        os.environ[STACKS] = self._stacks
        signal.signal(signal.SIGALRM, _interrupt)
        self._before: set[int] = set()  # processes that the test did not start
        self._of_fixtures: dict[pytest.FixtureDef[object], set[int]] = {}  # processes of fixtures of several tests
        self._report = ""  # on the test that runs, if it was ended
        self._test = _Test(0.0)
        self._changed = threading.Condition()
        threading.Thread(target=self._watch, daemon=True).start()

    def pytest_unconfigure(self) -> None:
        pathlib.Path(self._stacks).unlink(missing_ok=True)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self._report = ""
        programs.started.clear()
        self._before = set(family(os.getpid()))
        self._set_test(
            _Test(EXTENDED_SECONDS if any(map(item.get_closest_marker, ("extended", "seconds"))) else SECONDS)
        )
        try:
            return (yield)
        finally:
            self._set_test(_Test(0.0))

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[object]) -> Iterator[object]:
        """Keeps the processes that a fixture of several tests starts, and their families, until its end."""
        if fixturedef.scope == "function":
            return (yield)
        before = set(family(os.getpid()))
        try:
            return (yield)
        finally:
            self._of_fixtures[fixturedef] = set(family(os.getpid())) - before
            _kept.update(self._of_fixtures[fixturedef])

    def pytest_fixture_post_finalizer(self, fixturedef: pytest.FixtureDef[object]) -> None:
        if fixturedef.scope == "session":  # multiprocessing's servers end with this process
            return
        processes = self._of_fixtures.pop(fixturedef, set())
        _kept.difference_update(processes)
        self._before -= processes

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Iterator[None]:
        """Wait for the end of all processes that the test has started. If they never end, the test hangs."""
        result = yield
        seconds = 0.01
        while self._processes():
            time.sleep(seconds)
            seconds = min(2 * seconds, 1.0)  # it may not count as busy while it waits
        assert not self._report, "processes of the test did not end"
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[pytest.TestReport]:
        report: pytest.TestReport = yield
        if report.failed or self._report:
            report.sections += [
                (f"output of {' '.join(program.words)}", program.so_far) for program in programs.started
            ]
        if self._report:
            report.sections.append(("processes of the test that was ended, as it hung", self._report))
            self._report = ""
            if not report.failed:
                report.outcome, report.longrepr = "failed", "the test was ended, as it hung"
        return report

    def _set_test(self, test: _Test) -> None:
        with self._changed:
            self._test = test
            self._changed.notify()

    def _ends(self, test: _Test, seconds: float | None = None) -> bool:
        """Wait for so many seconds; whether the test has ended by then."""
        with self._changed:
            return self._changed.wait_for(lambda: self._test is not test, seconds)

    def _processes(self) -> list[int]:
        """The processes of the test that have not ended."""
        for program in programs.started:
            program.poll()
        active_children()
        servers = {SERVER.pid} if SERVER.pid is not None else set()
        kept = {each for process in _kept | servers for each in family(process)}
        found = []
        for process in family(os.getpid())[1:]:
            if (state := state_of(process)) == "Z":
                if all(program.pid != process for program in programs.started):  # a Program reads its own exit code
                    _collect(process)
            elif state and process not in self._before | kept:
                found.append(process)
        return found

    def _watch(self) -> None:
        while True:
            test = self._test
            if not self._ends(test, test.seconds / 2 or None) and self._hangs(test):
                self._end_test(test)

    def _hangs(self, test: _Test) -> bool:
        """Return when the test hangs or has ended; whether it hangs."""
        idle, start = 0.0, time.monotonic()
        wanted, now = _wanted(), start
        while idle < test.seconds / 2 and now < start + _LONGEST * test.seconds:
            if self._ends(test, _SAMPLE_SECONDS):
                return False
            before, then, wanted, now = wanted, now, _wanted(), time.monotonic()
            cores = sum(wanted[each] - before.get(each, 0.0) for each in wanted) / (now - then)
            idle = idle + now - then if cores < _BUSY else 0.0
        return True

    def _end_test(self, test: _Test) -> None:
        processes = self._processes()
        self._report = "\n".join([*map(self._describe, processes), _own_stack()])
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if self._ends(test, _END_SECONDS):
            return
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
        if not self._ends(test, _END_SECONDS):
            os.write(2, f"{self._report}\nThe test hangs in this process, which ends.\n".encode())
            os._exit(1)

    def _describe(self, process: int) -> str:
        """The state of a process, its command line and its stack."""
        path, text = pathlib.Path(self._stacks), "(no stack)"
        if state_of(process) != "T" and catches(process, SHOW_STACKS):
            size = path.stat().st_size
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, SHOW_STACKS)
            for _ in range(20):
                time.sleep(0.1)
                text = path.read_bytes()[size:].decode(errors="replace") or text
        return f"process {process} ({state_of(process)}): {command_of(process)}\n{text}"


def _collect(process: int) -> None:
    """Collect a child that has ended. Its own parent has ended earlier, or nothing waits for it."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process, os.WNOHANG)


def _wanted() -> dict[int, float]:
    return {process: wanted_seconds(process) for process in family(os.getpid())}


def _own_stack() -> str:
    """The stacks of this process, without pytest's own part of them."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        lines = [line for line in file if not re.search(r'File "(<string>|.*/(_pytest|pluggy|xdist|execnet)/)', line)]
    return f"the process of the tests\n{''.join(lines)}"


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise HangError("the test was ended, as it hung")
