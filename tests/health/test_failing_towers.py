"""A tower that fails, dies or ends early: which one is named, and where it was."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import socket

import pytest
import torch

import mirrored
from tests.support.clusters import free_port, start_workers, torchrun_variables
from tests.support.jobs import towers
from tests.support.patience import patient_launch
from tests.support.programs import run_program, start_program
from tests.support.unwell import TORCHRUN, UNWELL, unwell
from tests.support.waiting import HANG, wait_until

pytestmark = pytest.mark.extended

HERE = "in step 3, in the step's function"
BOOM = f"mirrored: tower 1 failed {HERE}: ValueError: boom"
EARLY = "tower 1 ended with exit code"
RESET = "Connection reset by peer"


@pytest.mark.parametrize(
    ("towers", "words", "code", "last"),
    [
        (3, "raise 1 3 forward", 1, BOOM),
        (2, "raise 0 2 data", 1, "mirrored: tower 0 failed after step 2, loading data: ValueError: boom"),
        (2, "die 1 3 optimizer", 137, "mirrored: tower 1 was ended by SIGKILL in step 3, optimizer.step()"),
        (2, "exit0 1 3 forward", 1, f"mirrored: root cause: {EARLY} 0 {HERE}, while others continued"),
        (2, "exit75 1 3 forward", 1, f"mirrored: {EARLY} 75 {HERE}, and others did not, so nothing was saved together"),
        # An exception ends all, whatever else the tower still does.
        *((2, f"{how} 1 3 forward", 1, BOOM) for how in ("thread", "pool", "atexit")),
        (2, "text 1 3 forward", 1, f"mirrored: tower 1 failed {HERE}: NoText: (its text cannot be had: RuntimeError)"),
    ],
)
@pytest.mark.row(42)
def test_the_last_line_names_the_tower_and_its_place(towers: int, words: str, code: int, last: str) -> None:
    result, _ = unwell(towers, *words.split(), code=code)
    assert result.stderr.splitlines()[-1] == last


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
    text = "in step 3, writing the checkpoint"
    with patient_launch(), pytest.raises(mirrored.TowerFailedError, match=text) as caught:
        towers(die)
    assert "ended by SIGKILL" in str(caught.value)
    [other] = [failure for failure in caught.value.failures if failure.tower == 0]
    assert "tower 1 was last seen in step 3, writing the checkpoint" in other.traceback


@pytest.mark.parametrize(
    ("tower", "words", "end"),
    [
        (0, "raise 0 3 forward", f"failed {HERE}: ValueError: boom"),
        (1, "die 1 3 forward", f"was ended by SIGKILL {HERE}"),
        (1, "reset 1 2 data", f"failed after step 2, loading data: ConnectionResetError: [Errno 104] {RESET}"),
        (1, "exit0 1 3 forward", f"ended with exit code 0 {HERE}"),
        (1, "exit75 1 3 forward", f"ended with exit code 75 {HERE}"),
    ],
)
def test_every_worker_names_the_tower_that_failed_first(tower: int, words: str, end: str) -> None:
    processes = start_workers(UNWELL, *words.split())
    errors = [process.communicate(timeout=HANG)[1] for process in processes]
    for error in errors:
        assert f"tower {tower} on {socket.gethostname()} (worker {tower}) {end}" in error.splitlines()[-1]
    codes = [process.returncode for process in processes]
    assert codes == [1, 1] if words.startswith("exit") else 0 not in codes, errors


def test_an_exception_whose_report_cannot_be_written_is_printed_by_its_tower() -> None:
    result, _ = unwell(2, "disk", "1", "3", "forward")
    assert re.search(r"^\[tower 1\] .*ValueError: boom$", result.stderr, re.MULTILINE)
    assert result.stderr.splitlines()[-1] == f"mirrored: {EARLY} 1 {HERE}"


def test_an_exception_ends_a_stuck_tower_of_the_users_torchrun() -> None:
    result, _ = unwell(2, "thread", "1", "3", "forward", starter=TORCHRUN)
    assert "ValueError: boom" in result.stderr[result.stderr.index("Root Cause") :]


def test_a_killed_tower_is_reported_by_the_others_if_its_launcher_leaves_them_alone() -> None:
    """Some launchers leave the other towers alone, such as ``srun`` without ``--kill-on-bad-exit``."""
    port = str(free_port())
    programs = [
        start_program([UNWELL, "die", "1", "3", "forward"], env=torchrun_variables(RANK=rank, MASTER_PORT=port))
        for rank in ("0", "1")
    ]
    (_, waiting), _ = (program.communicate() for program in programs)
    assert programs[1].returncode == -signal.SIGKILL
    assert re.search(r"PeerLostError: .*tower 1", waiting), waiting


def has_ended(process: int) -> bool:
    """Whether it has, though perhaps nobody has waited for it."""
    try:
        return "State:\tZ" in pathlib.Path(f"/proc/{process}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_what_a_tower_has_started_ends_with_the_job() -> None:
    result, _ = unwell(2, "child", "1", "3", "forward", code=137)
    child = re.search(r"child (\d+)", result.stderr)
    assert child
    wait_until(lambda: has_ended(int(child[1])))


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
    result = run_program([str(script)], code=1)
    last = result.stderr.splitlines()[-1]
    assert last.startswith(
        "mirrored: root cause: tower 1 ended with exit code 0 after step 1, while others continued and"
    )
    assert last.endswith("look for one under `if strategy.is_chief:`")
