"""How soon a tower that has failed ends, and processes that others hold up: agents, and towers with groups to leave."""

from __future__ import annotations

import contextlib
import errno
import pathlib
import shlex
import subprocess
import sys
import threading

import pytest
import torch

import mirrored
from tests.support.jobs import ROOT, towers
from tests.support.patience import patient_launch
from tests.support.programs import run_program
from tests.support.waiting import HANG, forever
from towers.health import failure
from towers.launching.job import Job, agent_command

pytestmark = pytest.mark.extended


def test_threads_of_a_failed_tower_have_less_time_than_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, at_exit, now = [], [], [100.0]
    monkeypatch.setattr(failure.faulthandler, "dump_traceback_later", lambda seconds, **_: asked.append(seconds))
    monkeypatch.setattr(failure.atexit, "register", at_exit.append)
    monkeypatch.setattr(failure.clock, "monotonic", lambda: now[0])
    failure.end_soon()
    for later in (0.5, 1.4, 30.0):  # the last where a checkpoint was being written
        now[0] = 100.0 + later
        at_exit[0]()
    assert asked == pytest.approx([1.5, 2.0, 1.1, 1.0])


@pytest.mark.parametrize("prints", [True, False])
def test_the_traceback_is_printed_before_the_time_of_a_failed_tower_begins(
    prints: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []

    def printing(*_: object) -> None:
        done.append("printed")
        if not prints:
            raise OSError("nobody reads this")

    monkeypatch.setattr(sys, "excepthook", printing)
    monkeypatch.setattr(failure, "end_soon", lambda: done.append("ends soon"))
    monkeypatch.setattr(failure, "end_in", lambda seconds: done.append("ends in any case"))
    failure.install_hooks.__wrapped__()
    error = ValueError("boom")
    with contextlib.nullcontext() if prints else pytest.raises(OSError):
        sys.excepthook(ValueError, error, None)
    assert done == ["ends in any case", "printed", "ends soon"]


def test_a_report_says_when_the_exception_came(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(failure.clock, "wall_time", lambda: 1000.5)
    assert failure._report(mirrored.PeerLostError("gone"), str(tmp_path / "report"))
    report = failure.FailureReport.read(tmp_path / "report")
    assert (report.time, report.consequence) == (1000.5, True)


REPORTS = """
import sys, threading
import torch, mirrored
from towers.health import failure

strategy = mirrored.OneDeviceStrategy("cpu:0")
failure.install_hooks()
store = torch.distributed.HashStore()
torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)  # replaces sys.excepthook
printing, other_ends = threading.Event(), threading.Event()


class Error(mirrored.PeerLostError):
    def __str__(self):  # while this error is printed
        if sys.stderr is not sys.__stderr__ and not printing.is_set():
            printing.set()
            other_ends.wait(1)
        return "the script's"


def find_the_same():
    printing.wait()
    failure.leave_report(RuntimeError("the other thread's"), "")
    other_ends.set()
    failure.leave(1)


threading.Thread(target=find_the_same, daemon=True).start()
raise Error
"""


def test_an_error_that_two_threads_find_is_reported(tmp_path: pathlib.Path) -> None:
    """torch's excepthook holds back what is printed meanwhile."""
    (tmp_path / "reports.py").write_text(REPORTS)
    result = run_program(["reports.py"], cwd=str(tmp_path), code=1)
    assert "Error: the script's" in result.stderr


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (mirrored.PeerLostError("gone"), True),
        (torch.distributed.DistNetworkError("Broken pipe"), True),
        (RuntimeError("[/pytorch/third_party/gloo/transport/tcp/pair.cc:5] Connection closed by peer"), True),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), False),
        (RuntimeError("Caught ConnectionResetError in DataLoader worker process 0.\nConnection reset by peer"), False),
        (BrokenPipeError(errno.EPIPE, "Broken pipe"), False),
    ],
)
def test_only_errors_of_collectives_say_that_a_tower_is_lost(error: Exception, lost: bool) -> None:
    assert failure.is_peer_lost(error) == lost


def raise_beside_a_thread(strategy: mirrored.Strategy) -> None:
    if strategy.topology.index == 1:
        threading.Thread(target=forever).start()
        raise ValueError("boom")
    strategy.reduce("sum", 1)


def test_a_stuck_tower_of_launch_ends_so_that_the_others_see_it() -> None:
    with patient_launch(), pytest.raises(mirrored.TowerFailedError, match="ValueError: boom") as caught:
        towers(raise_beside_a_thread)
    assert {failed.tower: failed.consequence for failed in caught.value.failures} == {0: True, 1: False}


LEAVING = """
import threading
from torch.distributed import TCPStore
from towers.launching.starting.agent import leave

store = TCPStore("127.0.0.1", 0, 1, True, wait_for_workers=False)

def ask() -> None:
    while True:
        store.check(["failure"])
        asked.release()

asked = threading.Semaphore(0)
for _ in range(4):
    threading.Thread(target=ask, daemon=True).start()
for _ in range(100):
    asked.acquire()
print("last words", flush=False)
leave(3)
"""


def test_threads_in_a_store_do_not_abort_an_agent_that_ends() -> None:
    """With ``sys.exit`` in the place of ``leave`` this is exit code 134 in five of five runs."""
    result = run_program(["-c", LEAVING])
    assert (result.returncode, result.stdout, result.stderr) == (3, "last words\n", "")


SLOW_STORE = """
import os, signal, subprocess, time
import mirrored

strategy = mirrored.MirroredStrategy(mirror_check_interval=None)
if strategy.is_chief:
    agent = os.getppid()
    os.kill(agent, signal.SIGSTOP)
    time.sleep(1.5)
    subprocess.Popen(["sh", "-c", f"for i in $(seq 40); do [ -e late ] && break; sleep 0.1; done; kill -CONT {agent}"])

    class Late:
        def __del__(self):
            os.mkdir("late")
            time.sleep(0.5)

    late = Late()
"""


def test_a_tower_that_ends_within_a_slow_request_of_its_store_does_not_abort(tmp_path: pathlib.Path) -> None:
    """Its heartbeat waits for the stopped agent, which goes on while an interpreter that does not wait is finalized."""
    (tmp_path / "train.py").write_text(SLOW_STORE)
    run_program(["-m", "mirrored", "run", "--devices", "cpu:0,cpu:1", "train.py"], cwd=str(tmp_path), code=0)


SAID = "mirrored: warning: the process groups could not be destroyed within 0 s"
ENDS = {
    "raise ValueError('boom')": (1, "ValueError: boom"),
    "raise KeyboardInterrupt": (130, "KeyboardInterrupt"),
    "": (0, SAID),
    "sys.exit(3)": (3, SAID),
    "sys.exit('no data')": (1, SAID),
    "communicator.health.exit_code = 75": (75, SAID),
}


def test_a_tower_that_cannot_shut_down_its_groups_ends(tmp_path: pathlib.Path) -> None:
    """NCCL, whose groups wait for other towers, is played by what sleeps; one program plays all ends."""
    result = run_program([str(ROOT / "tests" / "programs" / "shutdowns.py"), str(tmp_path), *ENDS], timeout=HANG)
    ends = {}
    for number, (how, code) in enumerate(zip(ENDS, result.stdout.split(), strict=True)):
        assert (tmp_path / f"{number}.out").read_text() == "last words\n", how
        last = (tmp_path / f"{number}.err").read_text().splitlines()[-1]
        ends[how] = (int(code), last[: len(ENDS[how][1])])
    assert ends == ENDS


def test_a_job_that_nobody_listens_to_ends_well() -> None:
    """Its starter has closed its outputs, as some schedulers do."""
    command = shlex.join(agent_command(Job(1), [sys.executable, "-c", "import sys"]))
    assert subprocess.run(["sh", "-c", f"exec {command} >&- 2>&-"], timeout=HANG).returncode == 0
