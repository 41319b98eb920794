"""The end of processes that others hold up: agents, and towers that cannot shut down their groups."""

from __future__ import annotations

import pathlib
import shlex
import subprocess
import sys

import pytest

from tests.support.jobs import ROOT, run_program
from tests.support.waiting import HANG
from towers.launching.job import Job, agent_command

pytestmark = pytest.mark.slow

LEAVING = """
import threading
from torch.distributed import TCPStore
from towers.launching.agent import leave

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


SAID = "towers: the process groups could not be destroyed within 0 s"
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
