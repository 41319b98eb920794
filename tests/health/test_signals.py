"""Jobs that are told to end by a signal, a closed terminal or the death of their launcher."""

from __future__ import annotations

import os
import pathlib
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from tests.support.commands import Command, command_line, start_command
from tests.support.jobs import ROOT
from tests.support.prefetching import told_to_end
from tests.support.waiting import HANG, wait_until
from towers.health.failure import EXIT_PREEMPTED

pytestmark = pytest.mark.slow

TOLD = str(ROOT / "tests" / "programs" / "told.py")
Told = tuple[Command, list[int]]


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
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_towers_that_are_told_to_end_may_save(told: Told, number: signal.Signals) -> None:
    process, _ = told
    process.send_signal(number)
    out, error = process.communicate(timeout=HANG)
    assert out.splitlines() == ["saved"]
    assert process.returncode == EXIT_PREEMPTED
    said = rf"towers: preempted by {number.name}: the towers ended after step \d+, with exit code 75"
    assert re.fullmatch(said, error.splitlines()[-1])


@pytest.mark.parametrize("told", ["agree"], indirect=True)
def test_a_tower_that_alone_is_told_takes_the_others_along(told: Told) -> None:
    process, ids = told
    os.kill(ids[1], signal.SIGTERM)
    out, error = process.communicate(timeout=HANG)
    assert out.splitlines() == ["saved"]
    assert process.returncode == EXIT_PREEMPTED
    assert re.fullmatch(r"towers: preempted: .*", error.splitlines()[-1])


@pytest.mark.parametrize("told", ["stubborn"], indirect=True)
def test_a_second_signal_ends_all_at_once(told: Told) -> None:
    process, ids = told
    process.terminate()
    assert process.stdout.readline() == "told\n"
    assert process.poll() is None
    process.terminate()
    process.communicate(timeout=HANG)
    assert process.returncode == -signal.SIGTERM
    wait_until(lambda: not any(os.path.exists(f"/proc/{tower}") for tower in ids))


@pytest.mark.parametrize("told", ["stubborn-fail"], indirect=True)
def test_a_failure_ends_also_those_that_handle_signals(told: Told) -> None:
    process, _ = told
    _, error = process.communicate(timeout=HANG)
    assert process.returncode == 1
    assert re.fullmatch(r"towers: tower 1 failed after step 4: ValueError: boom", error.splitlines()[-1])


def test_towers_of_a_killed_torchrun_end() -> None:
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", TOLD, "stubborn"]
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    towers = [int(word) for word in process.stdout.readline().split()]
    process.kill()
    process.wait()
    wait_until(lambda: not any(os.path.exists(f"/proc/{tower}") for tower in towers))


@pytest.fixture
def short_path() -> Iterator[pathlib.Path]:
    """A directory with a short name: those of sockets have at most 108 characters."""
    with tempfile.TemporaryDirectory() as directory:
        yield pathlib.Path(directory)


@pytest.mark.parametrize("saves", [True, False])
def test_a_program_that_launches_passes_signals_on(
    saves: bool, tmp_path: pathlib.Path, short_path: pathlib.Path
) -> None:
    folder, temporary = tmp_path / "run", short_path
    words = [str(ROOT / "tests" / "programs" / "told_launch.py"), str(folder) if saves else "none"]
    environment = {**os.environ, "TMPDIR": str(temporary)}
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    towers = [int(word) for word in process.stdout.readline().split()]
    process.terminate()
    assert process.wait(HANG) == (EXIT_PREEMPTED if saves else -signal.SIGTERM)
    wait_until(lambda: not any(os.path.exists(f"/proc/{tower}") for tower in towers))
    assert not list(temporary.glob("towers-*"))
    assert saves == any(folder.glob("step-*"))


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
        assert jobs[0].returncode == 1
    else:
        assert {job.returncode for job in jobs} == {EXIT_PREEMPTED}, errors
        assert starter == "launch" or all("towers: preempted by SIGTERM" in error for error in errors)


def _in_a_terminal(terminal: str, *words: str) -> int | None:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    os.setsid()
    opened = os.open(terminal, os.O_RDWR)  # the first one that a session opens is the one that ends it
    for number in range(3):
        os.dup2(opened, number)
    os.close(opened)
    return command_line(*words)


def test_a_closed_terminal_lets_the_towers_save(tmp_path: pathlib.Path) -> None:
    """The program has a terminal of its own, which is closed while it trains."""
    ours, theirs = pty.openpty()
    program = str(ROOT / "tests" / "programs" / "until_told.py")
    process = Command(_in_a_terminal, os.ttyname(theirs), "mirrored", "run", "--towers", "2", program, str(tmp_path))
    said = b""
    while b"step 3" not in said:
        assert select.select([ours], [], [], HANG)[0], said
        said += os.read(ours, 1000)
    os.close(theirs)
    os.close(ours)
    process.communicate(timeout=HANG)
    assert process.returncode == EXIT_PREEMPTED
    assert list(tmp_path.glob("step-*"))
