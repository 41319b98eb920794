"""Runs that fail in the middle, and go on: one of each kind; scripts/faults plays all of them."""

from __future__ import annotations

import json
import pathlib
import signal
from typing import Any

import pytest

import mirrored
from tests.faults.faults import PHASES, Fault
from tests.faults.injection import PROGRAM, differences, inject, launched
from tests.support.clusters import start_workers
from tests.support.programs import Program, end_of, start_command, start_program
from tests.support.waiting import HANG, wait_until

pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What three towers come to that nothing happens to."""
    return launched(tmp_path_factory.mktemp("three") / "run")


@pytest.fixture(scope="module")
def expected_of_two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What two towers come to."""
    return launched(tmp_path_factory.mktemp("two") / "run", towers=2)


def test_a_program_with_a_fault_goes_on_to_the_same_bits(expected_of_two: dict[str, Any]) -> None:
    """One of the faults that ``scripts/faults`` plays; most of those below start no program, which takes seconds."""
    ended, problems = inject(Fault.parse("SIGTERM:writing:1:7"), expected_of_two, HANG, towers=2)
    assert not problems, ended.errors


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("raise:data:1:7", "tower 1 of 3 failed, after step 7, loading data"),
        *((f"SIGKILL:{phase}:0:7", "the process of tower 0 ended by SIGKILL") for phase in PHASES),
        ("SIGSTOP:before optimizer.step:1:7", "tower 1 has sent no heartbeat"),
        ("disk full:writing:0:7", r"could not be written \(No space left on device\); earlier ones are as they were"),
    ],
)
def test_towers_with_a_fault_go_on_to_the_same_bits(
    tmp_path: pathlib.Path, fault: str, said: str, expected: dict[str, Any]
) -> None:
    with pytest.raises(mirrored.TowerFailedError, match=said):
        launched(tmp_path / "run", Fault.parse(fault))
    assert differences(launched(tmp_path / "run"), expected) == []


def start(towers: int, folder: pathlib.Path, *words: str) -> Program:
    """Start the program on some towers of this machine."""
    arguments = [str(folder), "--towers", str(towers), *words]
    if towers == 1:
        return start_program([*PROGRAM, *arguments])
    return start_command(["mirrored", "run", "--towers", str(towers), *PROGRAM, *arguments])


@pytest.mark.parametrize("towers", [1, 2])
@pytest.mark.row(43)
def test_told_to_end_it_finishes_the_step_and_saves(tmp_path: pathlib.Path, towers: int) -> None:
    process = start(towers, tmp_path / "run", "--fault", f"until told:forward:{towers - 1}:5", "--every", "100")
    wait_until((tmp_path / "run.fault").exists)
    process.send_signal(signal.SIGTERM if towers == 2 else signal.SIGINT)
    output, errors = end_of(process, 75)
    assert not output
    (saved,) = (tmp_path / "run").glob("step-*")
    step = int(saved.name[5:])
    assert step in (6, 7)
    assert f"after step {step}, which is saved; run the same command to resume" in errors
    if towers == 2:  # the other case goes on by the same command
        assert launched(tmp_path / "run", towers=2)["steps"] == 15
        return
    output, errors = start(towers, tmp_path / "run").communicate()
    assert f"resuming from {saved} (step {step})" in errors
    assert json.loads(output)["steps"] == 15


@pytest.mark.parametrize(("towers", "why"), [(2, "second signal"), (1, "grace is over")])
@pytest.mark.row(43)
def test_what_hangs_ends_all_the_same(tmp_path: pathlib.Path, towers: int, why: str) -> None:
    grace = str(HANG) if why == "second signal" else "0.5"
    fault = ["--fault", f"hang:forward:{towers - 1}:1"]
    process = start(towers, tmp_path / "run", "--grace", grace, *fault)
    wait_until((tmp_path / "run.fault").exists)
    process.send_signal(signal.SIGTERM)
    if why == "second signal":
        wait_until((tmp_path / "run.told").exists)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
    output, errors = process.communicate()
    assert process.returncode in (-signal.SIGTERM, 128 + signal.SIGTERM), errors
    assert ("no step was done 0.5 s after SIGTERM; ending" in errors) == (why == "grace is over")
    assert not output


def test_torchrun_starts_again_what_was_killed(tmp_path: pathlib.Path, expected_of_two: dict[str, Any]) -> None:
    torchrun = ["torchrun", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    program = [*PROGRAM, str(tmp_path / "run"), "--towers", "0", "--fault", "SIGKILL:forward:1:7"]
    output, errors = start_command([*torchrun, *program]).communicate()
    assert "resuming from" in errors
    assert (tmp_path / "run.fault").exists()
    assert differences(json.loads(output.splitlines()[-1]), expected_of_two) == []


def test_workers_that_are_started_again_go_on(tmp_path: pathlib.Path, expected_of_two: dict[str, Any]) -> None:
    words = [*PROGRAM, str(tmp_path / "run"), "--towers", "1"]
    for fault in (["--fault", "SIGKILL:all-reduce:1:7"], []):
        workers = start_workers(*words, *fault)
        outputs = [worker.communicate() for worker in workers]
        codes = [worker.returncode for worker in workers]
        assert codes == [0, 0] if not fault else all(codes), outputs
    assert differences(json.loads(outputs[0][0]), expected_of_two) == []
