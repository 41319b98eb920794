"""Jobs that are told to end by a signal, a closed terminal or the death of their launcher."""

from __future__ import annotations

import functools
import os
import pathlib
import pty
import re
import select
import signal
import tempfile
from collections.abc import Iterator

import pytest

from tests.support.jobs import ROOT
from tests.support.prefetching import PREFETCHES, told_to_end, wait_for_line
from tests.support.processes import await_ends, family
from tests.support.programs import Program, end_of, ended_with, start_command, start_program
from tests.support.waiting import HANG
from towers.health.failure import EXIT_PREEMPTED

pytestmark = pytest.mark.extended

WAITS = str(ROOT / "tests" / "programs" / "waits.py")
TOLD = str(ROOT / "tests" / "programs" / "told.py")
Told = tuple[Program, list[int]]


@pytest.fixture
def told(request: pytest.FixtureRequest) -> Iterator[Told]:
    """tests/programs/told.py in the mode that the test names, and the processes of its two towers."""
    process = start_command(["mirrored", "run", "--towers", "2", TOLD, request.param])
    try:
        yield process, [int(word) for word in process.stdout.readline().split()]
    finally:
        process.kill()
        process.communicate(timeout=HANG)


@pytest.mark.parametrize("told", ["agree"], indirect=True)
@pytest.mark.parametrize(
    ("tower", "number", "said"),
    [
        (None, signal.SIGTERM, r" by SIGTERM: the towers ended after step \d+, with exit code 75"),
        (None, signal.SIGINT, r" by SIGINT: the towers ended after step \d+, with exit code 75"),
        (1, signal.SIGTERM, ": .*"),  # which takes the others along
    ],
)
def test_towers_that_are_told_to_end_may_save(told: Told, tower: int | None, number: signal.Signals, said: str) -> None:
    process, ids = told
    os.kill(process.pid if tower is None else ids[tower], number)
    out, error = end_of(process, EXIT_PREEMPTED)
    assert out.splitlines() == ["saved"]
    assert re.fullmatch(f"mirrored: preempted{said}", error.splitlines()[-1])


def test_the_tasks_of_a_simulated_cluster_end_with_it() -> None:
    process = start_command(["mirrored", "cluster", WAITS])
    assert process.stdout.readline() == "ready\n"
    tasks = family(process.pid)[1:]
    assert len(tasks) >= 4, "two agents, each with a tower"
    process.kill()
    await_ends(*tasks)


@pytest.mark.parametrize("told", ["user"], indirect=True)
def test_a_signal_that_towers_handle_reaches_them(told: Told) -> None:
    process, _ = told
    os.kill(process.pid, signal.SIGUSR1)
    out, _ = end_of(process, EXIT_PREEMPTED)
    assert out.splitlines() == ["saved"]


@pytest.mark.parametrize("told", ["agree"], indirect=True)
def test_a_signal_that_no_tower_handles_ends_the_job(told: Told) -> None:
    process, ids = told
    os.kill(process.pid, signal.SIGUSR1)
    end_of(process, -signal.SIGUSR1)
    await_ends(*ids)


@pytest.mark.parametrize("told", ["stubborn"], indirect=True)
def test_a_second_signal_ends_all_at_once(told: Told) -> None:
    process, ids = told
    process.terminate()
    assert process.stdout.readline() == "told\n"
    assert process.poll() is None
    process.terminate()
    end_of(process, -signal.SIGTERM)
    await_ends(*ids)


@pytest.mark.parametrize("told", ["stubborn-fail"], indirect=True)
def test_a_failure_ends_also_those_that_handle_signals(told: Told) -> None:
    process, _ = told
    _, error = end_of(process, 1)
    assert re.fullmatch(r"mirrored: tower 1 failed after step 4: ValueError: boom", error.splitlines()[-1])


@pytest.mark.parametrize("saves", [True, False])
def test_a_program_that_launches_passes_signals_on(saves: bool, tmp_path: pathlib.Path) -> None:
    words = [PREFETCHES, str(tmp_path), "nothing", "nowhere", "launch"] if saves else [WAITS, "launch"]
    with tempfile.TemporaryDirectory() as temporary:  # with a short name: those of sockets have at most 108 characters
        process = start_program(words, env={"TMPDIR": temporary})
        wait_for_line(process.stdout, "step 3\n" if saves else "ready\n")
        _, *processes = family(process.pid)
        assert len(processes) >= 2, "two towers"
        process.terminate()
        end_of(process, EXIT_PREEMPTED if saves else -signal.SIGTERM)
        await_ends(*processes)
        assert not list(pathlib.Path(temporary).glob("towers-*"))
    assert saves == any(tmp_path.glob("step-*"))


@pytest.mark.parametrize(
    ("starter", "kind", "where"),
    [
        ("run", "pool", "all"),
        ("run", "thread", "1"),
        ("run", "handler", "all"),
        ("launch", "thread", "all"),
        ("launch", "pool", "1"),
        ("torchrun", "thread", "all"),
        ("torchrun", "pool", "1"),
        ("TF_CONFIG", "thread", "all"),
        ("TF_CONFIG", "pool", "1"),
    ],
)
def test_who_has_saved_ends_beside_a_thread_that_goes_on(
    starter: str, kind: str, where: str, tmp_path: pathlib.Path
) -> None:
    jobs = told_to_end(starter, tmp_path / "run", kind, where)
    errors = [job.communicate(timeout=HANG)[1] for job in jobs]
    assert list((tmp_path / "run").glob("step-*")), errors
    if starter == "torchrun":  # which has a code of its own
        assert ended_with(1, jobs[0].words, jobs[0].returncode, errors[0]), errors
    else:
        assert {job.returncode for job in jobs} == {EXIT_PREEMPTED}, errors
        assert starter == "launch" or all("mirrored: preempted by SIGTERM" in error for error in errors)


def _in_a_terminal(terminal: str) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    os.setsid()
    opened = os.open(terminal, os.O_RDWR)  # the first one that a session opens is the one that ends it
    for number in range(3):
        os.dup2(opened, number)
    os.close(opened)


def test_a_closed_terminal_lets_the_towers_save(tmp_path: pathlib.Path) -> None:
    """The program has a terminal of its own, which is closed while it trains."""
    ours, theirs = pty.openpty()
    words = ["mirrored", "run", "--towers", "2", PREFETCHES, str(tmp_path), "nothing", "nowhere"]
    process = start_command(words, enter=functools.partial(_in_a_terminal, os.ttyname(theirs)))
    said = b""
    while b"step 3" not in said:
        assert select.select([ours], [], [], HANG)[0], said
        said += os.read(ours, 1000)
    os.close(theirs)
    os.close(ours)
    end_of(process, EXIT_PREEMPTED)
    assert list(tmp_path.glob("step-*"))
