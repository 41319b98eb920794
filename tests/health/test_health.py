"""A tower that fails, dies, stops or is slow: who is named, where it was, and how soon all is over."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import pathlib
import pty
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import pytest
import torch

import mirrored
from mirrored.checkpoint.stopping import StopSignals
from tests.support.jobs import ROOT, run_program, towers
from tests.support.waiting import at_most, wait_until
from towers.collectives import nccl_watch, process_group
from towers.gradients.pairing import BackwardCounter
from towers.health import failure
from towers.health.failure import EXIT_PREEMPTED, FailureReport
from towers.health.status import Health, StatusRecord, record_path
from towers.launching import console
from towers.launching.job import Job, agent_command

UNWELL = str(ROOT / "tests" / "programs" / "unwell.py")
TOLD = str(ROOT / "tests" / "programs" / "told.py")


def within(seconds: float, *words: str) -> subprocess.CompletedProcess[str]:
    """As :func:`unwell`, over within so many seconds: the first time or, when other tests are in the way, the next."""
    result, took = unwell(*words)
    if took >= seconds:
        result, took = unwell(*words)
    assert took < seconds
    return result


def unwell(*words: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run tests/programs/unwell.py; its result, and the seconds from what happened to the end of all."""
    result = run_program([UNWELL, *words])
    happened = re.search(r"^(?:\[tower \d\] )?([0-9]+\.[0-9]+)$", result.stderr, re.MULTILINE)
    assert happened, result.stderr
    return result, time.time() - float(happened[1])


@pytest.mark.parametrize(
    ("words", "code", "last"),
    [
        ("3 raise 1 3 forward", 1, "towers: tower 1 failed in step 3, in the step's function: ValueError: boom"),
        ("2 raise 0 2 data", 1, "towers: tower 0 failed after step 2, loading data: ValueError: boom"),
        ("2 die 1 3 optimizer", 137, "towers: tower 1 was ended by SIGKILL in step 3, optimizer.step()"),
    ],
)
def test_row_42_the_last_line_says_who_and_where(words: str, code: int, last: str) -> None:
    result = within(5, *words.split())
    assert result.returncode == code
    assert result.stderr.splitlines()[-1] == last


def test_a_stopped_tower_is_found_at_the_deadline() -> None:
    result = within(3 + 5, *["3", "stop", "1", "3", "forward", "timeout_seconds=3"])
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert re.match(r"towers: tower [02] failed in step 3, averaging gradients: CollectiveTimeoutError: ", last)
    assert re.search(r"tower 1 has sent no heartbeat for \d+ s \(stopped, or its host is gone\)", last)
    assert last.endswith("it was last seen in step 3, in the step's function")


def wait_for_a_slow_tower(implementation: str) -> None:
    options = mirrored.CommunicationOptions(implementation=implementation, timeout_seconds=1)
    strategy = mirrored.MirroredStrategy(communication=options)
    with strategy.scope():
        weight = torch.nn.Linear(2, 1)
    slow = torch.ones(3, 2, requires_grad=True)

    def step() -> None:
        if strategy.health.step == 2 and strategy.topology.index == 1:
            slow.register_hook(lambda _: time.sleep(60))
        weight(slow).mean().backward()

    strategy.run(step)
    strategy.run(step)


@pytest.mark.parametrize("implementation", ["shared_memory", "gloo"])
def test_the_error_of_who_waits_shows_what_the_slow_tower_does(implementation: str) -> None:
    with at_most(30), pytest.raises(mirrored.TowerFailedError) as caught:
        mirrored.launch(wait_for_a_slow_tower, (implementation,), towers=3, timeout=60)
    text = str(caught.value)
    assert re.match(r"tower [02] of 3 failed, in step 2, averaging gradients:", text)
    assert re.search(r"; tower 1 is in step 2, backward, for \d+ s\. Every tower", text)
    assert "time.sleep(60)" in text[text.index("tower 1, most recent call last:") :]


def hang(strategy: mirrored.Strategy) -> None:
    model = strategy.mirror(torch.nn.Linear(2, 1))

    def step() -> None:
        if strategy.health.step == 2 and strategy.topology.index == 1:
            time.sleep(60)
        strategy.reduce("sum", 1)
        model(torch.ones(1, 2)).sum().backward()

    strategy.run(step)
    strategy.run(step)


def hang_with_a_deadline() -> None:
    hang(mirrored.MirroredStrategy(communication=mirrored.CommunicationOptions(step_timeout_seconds=2)))


def test_a_step_has_a_deadline() -> None:
    with at_most(30), pytest.raises(mirrored.TowerFailedError) as caught:
        mirrored.launch(hang_with_a_deadline, towers=2, timeout=60)
    assert caught.value.tower == 1
    assert str(caught.value).startswith("tower 1 of 2 failed, in step 2, in the step's function:")
    assert "time.sleep(60)" in str(caught.value)


def wait_for_a_gpu(found: str) -> None:
    """As between GPUs, of which there are none: NCCL finds something while the host waits for the device."""

    class Nccl:
        def _get_backend(self, device: torch.device) -> Nccl:
            return self

        def get_error(self) -> Nccl:
            return self

        name = "SUCCESS"

    options = mirrored.CommunicationOptions(implementation="gloo", timeout_seconds=7)
    strategy = mirrored.MirroredStrategy(communication=options)
    nccl_watch.watch(process_group.failures)

    def step() -> None:
        if strategy.topology.index == 1 and found == "TIMEOUT":
            with strategy.health.during("saving"):
                time.sleep(60)
        strategy.communicator.backend, strategy.communicator._group = "nccl", Nccl()
        time.sleep(2)
        Nccl.name = found
        time.sleep(50)

    strategy.run(step)


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ("TIMEOUT", r"CollectiveTimeoutError: tower 0 waited 7 s .*; tower 1 is in step 1, saving, for \d+ s"),
        ("COMM_ERROR", r"PeerLostError: tower [01] lost its connection to another tower in a collective \(NCCL: COMM"),
    ],
)
def test_what_nccl_finds_while_the_host_waits_for_a_gpu_is_said(found: str, text: str) -> None:
    with at_most(30), pytest.raises(mirrored.TowerFailedError, match=text) as caught:
        mirrored.launch(wait_for_a_gpu, (found,), towers=2, timeout=40)
    assert "time.sleep(50)" in str(caught.value)
    assert all(failure.consequence == (found == "COMM_ERROR") for failure in caught.value.failures)


def die(strategy: mirrored.Strategy) -> None:
    model = strategy.mirror(torch.nn.Linear(2, 1))

    def step() -> None:
        if strategy.health.step == 3 and strategy.topology.index == 1:
            with strategy.health.during("writing the checkpoint"):
                os.kill(os.getpid(), signal.SIGKILL)
        strategy.reduce("sum", 1)
        model(torch.ones(1, 2)).sum().backward()

    for _ in range(3):
        strategy.run(step)


def test_launch_says_where_a_killed_tower_was() -> None:
    with pytest.raises(mirrored.TowerFailedError, match="in step 3, writing the checkpoint") as caught:
        towers(die)
    assert "ended by SIGKILL" in str(caught.value)
    [other] = [failure for failure in caught.value.failures if failure.tower == 0]
    assert "tower 1 was last seen in step 3, writing the checkpoint" in other.traceback


def test_under_the_users_torchrun_the_others_say_where_it_hangs() -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = run_program([*torchrun, UNWELL, *["0", "sleep", "1", "3", "forward", "timeout_seconds=2"]])
    assert result.returncode == 1
    assert re.search(r"; tower 1 is in step 3, in the step's function, for \d s\. ", result.stderr)
    assert "time.sleep(60)" in result.stderr


# -- several workers -----------------------------------------------------------------------------------


def two_workers(*words: str) -> list[subprocess.Popen[str]]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as other:
        workers = [f"127.0.0.1:{found.getsockname()[1]}" for found in (server, other)]
    configs = [{"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}} for index in (0, 1)]
    pipe = subprocess.PIPE
    return [
        subprocess.Popen(
            [sys.executable, *words],
            env={**os.environ, "TF_CONFIG": json.dumps(config)},
            stdout=pipe,
            stderr=pipe,
            text=True,
        )
        for config in configs
    ]


@pytest.mark.parametrize(
    ("tower", "how", "end"),
    [
        (0, "raise", "failed in step 3, in the step's function: ValueError: boom"),
        (1, "die", "was ended by SIGKILL in step 3, in the step's function"),
    ],
)
def test_every_worker_names_the_tower_that_failed_first(tower: int, how: str, end: str) -> None:
    processes = two_workers(UNWELL, *f"0 {how} {tower} 3 forward".split())
    errors = [process.communicate(timeout=60)[1] for process in processes]
    for error in errors:
        assert f"tower {tower} on {socket.gethostname()} (worker {tower}) {end}" in error.splitlines()[-1]
    assert 0 not in [process.returncode for process in processes]


LEAVING = """
import threading, time
from torch.distributed import TCPStore
from towers.launching.agent import leave

store = TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)

def ask() -> None:
    while True:
        store.check(["failure"])

for _ in range(4):
    threading.Thread(target=ask, daemon=True).start()
time.sleep(0.2)
print("last words", flush=False)
leave(3)
"""


def test_threads_in_a_store_do_not_abort_an_agent_that_ends() -> None:
    """With ``sys.exit`` in the place of ``leave`` this is exit code 134 in five of five runs."""
    result = run_program(["-c", LEAVING])
    assert (result.returncode, result.stdout, result.stderr) == (3, "last words\n", "")


CANNOT_LEAVE = """
import atexit, sys, threading, time
import torch
from towers.collectives import process_group
from towers.collectives.communicator import Alone

class Group:
    def __del__(self) -> None:  # as NCCL's destructors, which wait for the others, too
        time.sleep(1000)

def starts_no_threads(self: threading.Thread) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")

group = Group()
process_group.leave_process_group = lambda: time.sleep(1000)
process_group.open_communicators.add(communicator := Alone(torch.device("cpu")))
process_group._LEAVING_SECONDS = 0.3
process_group.leave_at_exit(may_hang=True)
atexit.register(setattr, threading.Thread, "start", starts_no_threads)
print("last words")
{how}
"""


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("raise ValueError('boom')", 1, "ValueError: boom"),
        ("raise KeyboardInterrupt", 130, "KeyboardInterrupt"),
        ("", 0, "towers: the process groups could not be destroyed within 0 s"),
        ("sys.exit(3)", 3, "towers: the process groups could not be destroyed within 0 s"),
        ("sys.exit('no data')", 1, "towers: the process groups could not be destroyed within 0 s"),
        ("communicator.health.exit_code = 75", 75, "towers: the process groups could not be destroyed within 0 s"),
    ],
)
def test_a_tower_that_cannot_leave_the_others_ends(how: str, code: int, said: str) -> None:
    result = run_program(["-c", CANNOT_LEAVE.replace("{how}", how)], timeout=20)
    assert (result.returncode, result.stdout) == (code, "last words\n")
    assert result.stderr.splitlines()[-1].startswith(said)


def test_a_job_that_nobody_listens_to_ends_well() -> None:
    """Its starter has closed its outputs, as some schedulers do."""
    command = shlex.join(agent_command(Job(1), [sys.executable, "-c", "import sys"]))
    assert subprocess.run(["sh", "-c", f"exec {command} >&- 2>&-"], timeout=60).returncode == 0


# -- being told to end ---------------------------------------------------------------------------------


@pytest.fixture
def told(request: pytest.FixtureRequest) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """tests/programs/told.py in the mode that the test names, and the processes of its towers."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, TOLD, request.param], stdout=pipe, stderr=pipe, text=True)
    try:
        assert process.stdout is not None
        yield process, [int(word) for word in process.stdout.readline().split()]
    finally:
        process.kill()
        process.communicate(timeout=20)


Told = tuple[subprocess.Popen[str], list[int]]


@pytest.mark.parametrize("told", ["agree"], indirect=True)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_towers_that_are_told_to_end_may_save(told: Told, number: signal.Signals) -> None:
    process, _ = told
    process.send_signal(number)
    out, error = process.communicate(timeout=30)
    assert out.splitlines() == ["saved"]
    assert process.returncode == EXIT_PREEMPTED
    said = rf"towers: preempted by {number.name}: the towers ended after step \d+, with exit code 75"
    assert re.fullmatch(said, error.splitlines()[-1])


@pytest.mark.parametrize("told", ["agree"], indirect=True)
def test_a_tower_that_alone_is_told_takes_the_others_along(told: Told) -> None:
    process, ids = told
    os.kill(ids[1], signal.SIGTERM)
    out, error = process.communicate(timeout=30)
    assert out.splitlines() == ["saved"]
    assert process.returncode == EXIT_PREEMPTED
    assert re.fullmatch(r"towers: preempted: .*", error.splitlines()[-1])


@pytest.mark.parametrize("told", ["stubborn"], indirect=True)
def test_a_second_signal_ends_all_at_once(told: Told) -> None:
    process, ids = told
    process.terminate()
    time.sleep(1.0)
    assert process.poll() is None
    process.terminate()
    with at_most(5):
        process.communicate(timeout=30)
    assert process.returncode == -signal.SIGTERM
    assert not any(os.path.exists(f"/proc/{tower}") for tower in ids)


@pytest.mark.parametrize("told", ["stubborn-fail"], indirect=True)
def test_a_failure_ends_also_those_that_handle_signals(told: Told) -> None:
    process, _ = told
    with at_most(5):
        _, error = process.communicate(timeout=30)
    assert process.returncode == 1
    assert re.fullmatch(r"towers: tower 1 failed after step 4: ValueError: boom", error.splitlines()[-1])


# -- the record ----------------------------------------------------------------------------------------


def test_a_record_says_where_its_tower_is(tmp_path: pathlib.Path) -> None:
    health = Health(StatusRecord(record_path(tmp_path, 1), create=True))
    seen = StatusRecord.find(tmp_path, 1)
    assert seen is not None
    places = [str(seen.read())]
    health.enter("loading data")
    places.append(str(seen.read()))
    health.begin_run(None)
    with health.at("reduce('sum')"):
        places.append(str(seen.read()))
    with pytest.raises(OSError), health.during("writing the checkpoint — " + "x" * 100):
        raise OSError
    places.append(str(seen.read()))
    health.end_run()
    places.append(str(seen.read()))
    assert places == [
        "before its first step",
        "before its first step, loading data",
        "in step 1, in the step's function, at reduce('sum')",
        "in step 1, writing the checkpoint — " + "x" * 37,
        "after step 1",
    ]
    assert StatusRecord.find(tmp_path, 2) is None


@pytest.mark.parametrize(("seconds", "good"), [(0, False), (math.nan, False), (math.inf, True), (5, True)])
def test_the_step_deadline_may_be_infinite(seconds: float, good: bool) -> None:
    if good:
        mirrored.CommunicationOptions(step_timeout_seconds=seconds)
        return
    with pytest.raises(ValueError, match="step_timeout_seconds is .* \\(math.inf: no limit\\)"):
        mirrored.CommunicationOptions(step_timeout_seconds=seconds)


# -- deaths of other kinds ----------------------------------------------------------------------------------

HERE = "in step 3, in the step's function"


@pytest.mark.parametrize("how", ["thread", "pool", "atexit", "disk", "text"])
def test_an_exception_ends_all_whatever_the_tower_still_does(how: str) -> None:
    result = within(5, "2", how, "1", "3", "forward")
    assert result.returncode == 1
    what = "NoText: (its text cannot be had: RuntimeError)" if how == "text" else "ValueError: boom"
    if how == "disk":  # the report could not be written: the tower has printed it itself
        assert re.search(rf"^\[tower 1\] .*{what}$", result.stderr, re.MULTILINE)
        assert result.stderr.splitlines()[-1] == f"towers: tower 1 ended with exit code 1 {HERE}"
    else:
        assert result.stderr.splitlines()[-1] == f"towers: tower 1 failed {HERE}: {what}"


def test_an_exception_ends_a_stuck_tower_of_the_users_torchrun() -> None:
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", UNWELL]
    started = time.monotonic()
    result = run_program([*words, "0", "thread", "1", "3", "forward"])
    assert time.monotonic() - started < 30
    assert result.returncode == 1
    assert "ValueError: boom" in result.stderr


def test_threads_of_a_failed_tower_have_less_time_than_the_end_of_its_interpreter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, at_exit, now = [], [], [100.0]
    monkeypatch.setattr(failure.faulthandler, "dump_traceback_later", lambda seconds, **_: asked.append(seconds))
    monkeypatch.setattr(failure.atexit, "register", at_exit.append)
    monkeypatch.setattr(failure.time, "monotonic", lambda: now[0])
    failure.end_soon()
    for later in (0.5, 1.4, 30.0):  # the last where a checkpoint was being written
        now[0] = 100.0 + later
        at_exit[0]()
    assert asked == pytest.approx([1.5, 2.0, 1.1, 1.0])


def test_a_consequence_waits_for_the_launcher_unless_that_has_told_it_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr(failure.time, "sleep", waited.append)
    for told in (False, True):
        with (
            contextlib.suppress(mirrored.PeerLostError),
            StopSignals([signal.SIGUSR1], 30.0),
        ):
            if told:
                signal.raise_signal(signal.SIGUSR1)
            raise (error := mirrored.PeerLostError("gone"))
        failure._wait_if_consequence(error)
        assert len(waited) == 1


def raise_beside_a_thread(strategy: mirrored.Strategy) -> None:
    if strategy.topology.index == 1:
        threading.Thread(target=time.sleep, args=(60,)).start()
        raise ValueError("boom")
    strategy.reduce("sum", 1)


def test_a_stuck_tower_of_launch_ends_so_that_the_others_see_it() -> None:
    with pytest.raises(mirrored.TowerFailedError, match="ValueError: boom") as caught:
        towers(raise_beside_a_thread)
    assert [(failed.tower, failed.consequence) for failed in caught.value.failures] == [(1, False), (0, True)]


@pytest.mark.parametrize("code", [0, 75])
def test_a_tower_that_ends_early_is_named(code: int) -> None:
    result = within(8, "2", f"exit{code}", "1", "3", "forward")
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    if code == 0:
        assert last == f"towers: first of all, tower 1 ended with exit code 0 {HERE}, while others went on"
    else:
        nothing = "and others did not, so nothing was saved together"
        assert last == f"towers: tower 1 ended with exit code 75 {HERE}, {nothing}"


@pytest.mark.parametrize("code", [0, 75])
def test_every_worker_fails_when_a_tower_ends_early(code: int) -> None:
    workers = two_workers(UNWELL, "1", f"exit{code}", "1", "3", "forward")
    errors = [worker.communicate(timeout=60)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [1, 1], errors
    name = f"tower 1 on {socket.gethostname()} (worker 1) ended with exit code {code} {HERE}"
    for error in errors:
        assert name in error.splitlines()[-1]


def test_what_a_tower_has_started_ends_with_the_job() -> None:
    result = within(5, "2", "child", "1", "3", "forward")
    child = re.search(r"child (\d+)", result.stderr)
    assert child
    status = pathlib.Path(f"/proc/{child[1]}/status")
    assert not status.exists() or "State:\tZ" in status.read_text()


def test_towers_of_a_killed_torchrun_end() -> None:
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", TOLD, "stubborn"]
    process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    towers = [int(word) for word in process.stdout.readline().split()]
    process.kill()
    process.wait()
    wait_until(lambda: not any(os.path.exists(f"/proc/{tower}") for tower in towers), 5)


def test_a_report_is_foreign_data(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "error0.json"
    for text in (
        "",
        "{",
        "[]",
        '{"message": 3}',
        '{"message": {"extraInfo": {"time": "soon"}}}',
        "[" * 100_000,
        "\ud800",
    ):
        path.write_text(text, errors="surrogatepass")
        assert FailureReport.read(path) is None
    assert FailureReport.of(ValueError("boom")).write(str(path))
    report = FailureReport.read(path)
    assert report is not None
    assert (report.short, report.consequence) == ("ValueError: boom", False)


# -- told by other ways ---------------------------------------------------------------------------------------


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
    with at_most(10):
        assert process.wait(30) == (EXIT_PREEMPTED if saves else -signal.SIGTERM)
    assert not any(os.path.exists(f"/proc/{tower}") for tower in towers)
    assert not list(temporary.glob("towers-*"))
    assert saves == any(folder.glob("step-*"))


def test_a_closed_terminal_lets_the_towers_save(tmp_path: pathlib.Path) -> None:
    """The program has a terminal of its own, which is closed while it trains."""
    pid, terminal = pty.fork()
    if pid == 0:
        words = ["run", "--towers", "2", str(ROOT / "tests" / "programs" / "until_told.py"), str(tmp_path)]
        os.execv(sys.executable, [sys.executable, "-m", "mirrored", *words])
    said = b""
    while b"step 3" not in said:
        said += os.read(terminal, 1000)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == EXIT_PREEMPTED
    assert list(tmp_path.glob("step-*"))


def test_what_a_killed_relay_left_is_cleared_away(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, foreign = tmp_path / "towers-killed", tmp_path / "something-else"
    for directory in (killed, foreign):
        directory.mkdir()
        (directory / "status0").write_bytes(b"")
        os.utime(directory, (1, 1))
    with console.Relay() as living:
        os.utime(living.directory, (1, 1))
        assert not killed.exists()
        with console.Relay():
            assert living.directory.exists()
    assert [path.name for path in tmp_path.iterdir()] == ["something-else"]


def test_a_line_without_end_is_passed_on_in_pieces() -> None:
    pieces: list[str] = []
    lines = console.PrefixedLines("[tower 1] ", pieces.append)
    started = time.process_time()
    for _ in range(2000):
        lines("x" * 65536)
    assert time.process_time() - started < 5
    assert sum(piece.count("x") for piece in pieces) == 2000 * 65536


def test_a_call_that_the_chief_alone_makes_is_said_to_be_one(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import mirrored, torch\n"
        "strategy = mirrored.MirroredStrategy(['cpu:0', 'cpu:1'])\n"
        "model = strategy.mirror(torch.nn.Linear(1, 1))\n"
        "strategy.run(lambda: model(torch.ones(1, 1)).sum().backward())\n"
        "if strategy.is_chief:\n"
        "    strategy.reduce('sum', 1)\n"
    )
    result = run_program([str(script)])
    assert result.returncode == 1
    last = result.stderr.splitlines()[-1]
    assert last.startswith(
        "towers: first of all, tower 1 ended with exit code 0 after step 1, while others went on and"
    )
    assert last.endswith("look for one under `if strategy.is_chief:`")


# -- one count of steps ------------------------------------------------------------------------------------


def test_a_run_counts_as_a_step_when_it_trains() -> None:
    health = Health(StatusRecord())
    places = []

    def run(evaluates: bool, trains: bool) -> None:
        health.begin_run(evaluates)
        places.append(str(health.status))
        if trains:
            health.train()
            places.append(str(health.status))
        health.end_run()
        places.append(str(health.status))

    run(evaluates=True, trains=False)
    run(evaluates=False, trains=True)
    run(evaluates=False, trains=False)  # it had seemed to train
    run(evaluates=True, trains=True)  # it had not
    run(evaluates=True, trains=False)
    assert places == [
        "in an evaluation before its first step, in the evaluation's function",
        "before its first step",
        *["in step 1, in the step's function"] * 2,
        "after step 1",
        "in step 2, in the step's function",
        "after step 1",
        "in an evaluation after step 1, in the evaluation's function",
        "in step 2, in the step's function",
        "after step 2",
        "in an evaluation after step 2, in the evaluation's function",
        "after step 2",
    ]
    assert health.run == 5


def test_where_the_script_counts_its_steps_several_runs_may_be_one() -> None:
    health = Health(StatusRecord())
    health.go_on_after(20)
    assert str(health.status) == "after step 20"
    steps = []
    for run in range(1, 5):
        health.begin_run(None)
        steps.append(health.step)
        health.end_run()
        if run % 2 == 0:
            health.count(20 + run // 2)
    assert steps == [21, 22, 22, 22]  # each run is a step until the script has counted


def train_and_evaluate(folder: str, at: int) -> tuple[list[str], str]:
    """Three steps and two evaluations, one without eval(); fails in the second evaluation's run number ``at``."""
    strategy = mirrored.MirroredStrategy(seed=0)
    with strategy.scope():
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    places, evaluations = [], 0

    def note() -> None:
        places.append(strategy.health.status.when)

    def train_step() -> None:
        note()
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    @torch.no_grad()
    def look() -> None:
        note()

    def evaluate() -> None:
        nonlocal evaluations
        note()
        evaluations += 1
        if evaluations == at and strategy.topology.index == 1:
            raise ValueError("boom")

    checkpoints = mirrored.CheckpointManager(strategy, folder, {"model": model, "optimizer": optimizer})
    with checkpoints.resume():
        for _ in range(2):
            model.eval()
            strategy.run(evaluate)
            model.train()
            strategy.run(look)
            for _ in range(2):
                strategy.run(train_step)
                checkpoints.step()
    return places, strategy.health.status.when


def test_failures_and_checkpoints_have_one_count_of_steps(tmp_path: pathlib.Path) -> None:
    launch = functools.partial(mirrored.launch, train_and_evaluate, devices=["cpu:0", "cpu:1"], timeout=60)
    for places, after in launch((str(tmp_path), 0)):
        assert places == [
            "in an evaluation before its first step",
            "in step 1",  # the function is not known yet
            "in step 1",
            "in step 2",
            "in an evaluation after step 2",
            "in an evaluation after step 2",
            "in step 3",
            "in step 4",
        ]
        assert after == "after step 4"
    assert (tmp_path / "step-00000004").exists()
    with pytest.raises(mirrored.TowerFailedError, match="tower 1 of 2 failed, in an evaluation after step 6, in the"):
        launch((str(tmp_path), 2))


def test_a_backward_after_an_evaluation_is_told_by_step_and_run() -> None:
    health = Health(StatusRecord())
    backward = BackwardCounter(health)
    said = []
    for evaluates in (False, True, False):
        health.begin_run(evaluates)
        if not evaluates:
            health.train()
            backward.begin()
            said.append(str(backward))
        health.end_run()
    assert said == ["backward() 1 of step 1", "backward() 1 of step 2 (run 3)"]
