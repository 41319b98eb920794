"""Towers that are out of step end with a failure, whatever their script catches, on each way to start."""

from __future__ import annotations

import re

import pytest

from tests.support.clusters import srun_variables, start_workers
from tests.support.jobs import ROOT
from tests.support.programs import end_of, run_command, run_program, start_program
from tests.support.waiting import HANG
from towers.topology import DEVICES

pytestmark = pytest.mark.extended

PROGRAM = str(ROOT / "tests" / "programs" / "catches.py")
CATCHES = ["except RuntimeError", "suppress", "exit", "finally"]
LAUNCHERS = {
    "python": [],
    "mirrored run": ["mirrored", "run", "--towers", "2"],
    "torchrun": ["torchrun", "--nproc-per-node", "2"],
}


@pytest.mark.parametrize("how", CATCHES)
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_errors_that_a_script_catches(launcher: str, how: str) -> None:
    if launcher == "python":
        result = run_program([PROGRAM, "forward", how], env={DEVICES: "cpu:0,cpu:1"}, code=1)
    else:
        result = run_command([*LAUNCHERS[launcher], PROGRAM, "forward", how], code=1)
    words = r"tower \d (failed|ended)|put the towers out of step|RuntimeError: CUDA out of memory"
    last = result.stderr if launcher == "torchrun" else result.stderr.splitlines()[-1]
    assert re.search(words, last), last
    assert "the final number" not in result.stdout, "it ends at the next step"
    assert "AssertionError" not in result.stderr, "a tower's error looks like another's own"
    if how in ("except RuntimeError", "suppress"):
        assert 'catches.py", line ' in result.stderr, "the line of the script"


@pytest.mark.parametrize("how", CATCHES)
def test_errors_under_srun(how: str) -> None:
    tasks = [start_program([PROGRAM, "forward", how], env=srun_variables(task)) for task in range(2)]
    for task in tasks:
        task.communicate(timeout=HANG)
    assert max(task.returncode for task in tasks) == 1, "srun ends with the largest exit code of its tasks"


@pytest.mark.parametrize("how", CATCHES)
def test_errors_in_launch(how: str) -> None:
    program = str(ROOT / "tests" / "programs" / "launches.py")
    result = run_program([program, PROGRAM, "forward", how], code=1)
    assert re.search(r"TowerFailedError: tower \d of 2 (failed|ended)", result.stderr), result.stderr


@pytest.mark.parametrize("where", ["backward", "after"])
@pytest.mark.parametrize("how", CATCHES)
def test_errors_at_other_places(where: str, how: str) -> None:
    run_command([*LAUNCHERS["mirrored run"], PROGRAM, where, how], code=1)


@pytest.mark.parametrize("how", CATCHES)
def test_errors_on_workers(how: str) -> None:
    for worker in start_workers(PROGRAM, "forward", how):
        _, errors = end_of(worker, 1)
        assert re.search(r"tower \d .*(failed|ended)", errors.splitlines()[-1])
