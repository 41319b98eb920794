"""An attempt at a job: what it leaves to the next one, and how it ends processes that another one has started."""

from __future__ import annotations

import itertools
import pathlib
import signal
import socket
import subprocess
import sys
import textwrap

import pytest

from tests.support.programs import end_of, run_program, start_command
from tests.support.waiting import HANG
from towers.health.failure import EXIT_PREEMPTED, FailureReport
from towers.health.status import StatusRecord
from towers.launching.job import Job
from towers.launching.restarting.rendezvous import Rendezvous
from towers.launching.restarting.restarts import RestartableAttempt
from towers.launching.starting import simulate_cluster
from towers.launching.supervising.attempt import Attempt
from towers.launching.supervising.failure_broadcast import FailureBroadcast
from towers.topology import ERROR_FILE, STATUS_RECORD

pytestmark = pytest.mark.extended

HANDLES = """
import signal, sys
from tests.support.waiting import forever

signal.signal(signal.SIGTERM, lambda *_: sys.exit({code}))
print(flush=True)
forever()
"""
"""A program that prints a line, and ends with ``code`` when it receives SIGTERM."""


def test_a_second_attempt_finds_nothing_of_the_first(tmp_path: pathlib.Path) -> None:
    first, second = Attempt(tmp_path), Attempt(tmp_path, 1)
    variables = first.file_variables(0)
    FailureReport.of(ValueError("boom")).write(variables[ERROR_FILE])
    StatusRecord(variables[STATUS_RECORD], create=True)
    report = first.report_of(0)
    assert report.text == "ValueError: boom"
    assert first.status_of(0) is not None
    assert second.report_of(0) is second.status_of(0) is None
    assert not set(variables.values()) & set(second.file_variables(0).values())


def test_towers_that_go_on_after_a_failure_are_ended(tmp_path: pathlib.Path) -> None:
    attempt = Attempt(tmp_path)
    programs = ["import time; time.sleep(100_000)", "import sys; sys.exit(3)"]
    processes = [subprocess.Popen([sys.executable, "-c", program]) for program in programs]
    attempt.processes = {tower: process.pid for tower, process in enumerate(processes)}
    attempt.wait()
    assert attempt.endings == {1: 3}
    assert attempt.living() == [0]
    attempt.end()
    assert attempt.living() == []
    assert attempt.endings == {1: 3}, "tower 0 has not ended by itself"
    assert [process.wait() for process in processes] == [-signal.SIGTERM, 3]


@pytest.mark.parametrize(("restores", "ending"), [(False, 7), (True, -signal.SIGKILL)])
def test_towers_that_would_save_are_killed_where_another_attempt_follows(
    restores: bool, ending: int, tmp_path: pathlib.Path
) -> None:
    job = Job(2)
    attempt = RestartableAttempt(job, tmp_path, 0, FailureBroadcast(""), Rendezvous(job, ""))
    handles = HANDLES.format(code=7)
    processes = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, start_new_session=True)
        for program in (handles, "import sys; sys.exit(3)")
    ]
    attempt.processes = {tower: process.pid for tower, process in enumerate(processes)}
    record = StatusRecord(attempt.file_variables(0)[STATUS_RECORD], create=True)
    if restores:
        record.set_restores()
    assert processes[0].stdout.readline() == b"\n"
    attempt.wait()
    attempt.end()
    assert [process.wait() for process in processes] == [ending, 3]
    for process in processes:
        process.stdout.close()


def test_a_worker_may_come_before_the_towers_can_save(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are told to when they can: until then the signal would be their end."""
    handles = HANDLES.format(code=75)
    broadcast, job = FailureBroadcast("", joinable=True), Job(1)
    attempt = RestartableAttempt(job, tmp_path, 0, broadcast, Rendezvous(job, ""))
    with subprocess.Popen([sys.executable, "-c", handles], stdout=subprocess.PIPE) as process:
        attempt.processes = {0: process.pid}
        broadcast.joins = True
        assert process.stdout.readline() == b"\n"
        record = StatusRecord(attempt.file_variables(0)[STATUS_RECORD], create=True)
        record.set_restores()
        statuses = itertools.chain([None, None], itertools.repeat(record.read()))
        monkeypatch.setattr(attempt, "status_of", lambda _: next(statuses))
        attempt.wait(HANG)
        process.kill()
    assert attempt.endings == {0: EXIT_PREEMPTED}


SAVES = r"""
    import os, signal, sys
    from tests.support.waiting import forever

    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(75))
    print("ready", flush=True)
    forever()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_a_cluster_that_is_told_to_end_lets_its_workers_save(number: signal.Signals, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "saves.py"
    script.write_text(textwrap.dedent(SAVES))
    process = start_command(["mirrored", "cluster", str(script)])
    lines = {process.stdout.readline(), process.stdout.readline()}
    assert lines == {"ready\n", "[worker 1] ready\n"}
    process.send_signal(number)
    end_of(process, EXIT_PREEMPTED)


PIECES = """
    import json, os, pathlib, sys
    from tests.support.waiting import wait_until

    output, begun = map(pathlib.Path, sys.argv[1:])
    if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 0:
        os.write(2, b"first\\n")
        os.write(1, b"sec")
        begun.touch()
        wait_until(lambda: "between" in output.read_text())
        os.write(1, b"ond\\n")
        os.write(2, b"third\\n")
        os.write(1, b"last")
    else:
        wait_until(begun.exists)
        print("between", flush=True)
"""


def test_lines_of_workers_are_whole_in_a_file(tmp_path: pathlib.Path) -> None:
    script, output, begun = (tmp_path / name for name in ("pieces.py", "output", "begun"))
    script.write_text(textwrap.dedent(PIECES))
    into_a_file = ["bash", "-c", f'exec "$@" > {output} 2>&1', "bash"]
    words = ["-m", "mirrored", "cluster", str(script), str(output), str(begun)]
    run_program(words, before=into_a_file, code=0)
    lines = output.read_text().splitlines()
    lines.remove("[worker 1] between")  # before or after the first line, which is on its way through another pipe
    assert lines == ["first", "second", "third", "last"]


TALKS = """
    while True:
        print("line", flush=True)
"""


def test_a_cluster_whose_output_is_not_read_any_more_ends(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "talks.py"
    script.write_text(textwrap.dedent(TALKS))
    until_a_line = ["bash", "-c", '"$@" | head -1', "bash"]
    result = run_program(["-m", "mirrored", "cluster", "--workers", "1", str(script)], before=until_a_line)
    assert result.stdout == "line\n"
    assert "BrokenPipeError" in result.stderr


STUBBORN = """
    import json, os, signal, sys
    from tests.support.waiting import forever

    if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
        sys.exit(3)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    forever()
"""


def test_a_worker_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate_cluster, "_GRACE", 0.5)
    assert simulate_cluster.simulate([sys.executable, "-c", textwrap.dedent(STUBBORN)], 2) == 1
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_reserved_ports_are_free_at_all_addresses() -> None:
    for one in simulate_cluster.reserve_ports(2):
        port = one.getsockname()[1]
        with socket.socket() as taken, pytest.raises(OSError, match="in use"):
            taken.bind(("127.0.0.2", port))  # as the system does for a connection from this address
        for host in ("127.0.0.1", ""):
            socket.create_server((host, port)).close()
