"""The seconds that docs/concepts/failures.md promises. Other tests of this folder check the messages."""

from __future__ import annotations

import pathlib
import time
from collections.abc import Callable

import pytest

from tests.support.jobs import ROOT
from tests.support.prefetching import told_to_end
from tests.support.processes import await_ends
from tests.support.programs import start_command, start_program
from tests.support.unwell import unwell
from towers.health.failure import EXIT_PREEMPTED

pytestmark = pytest.mark.seconds

Promise = Callable[[float, float], None]
TOLD = str(ROOT / "tests" / "programs" / "told.py")


@pytest.mark.parametrize(
    ("words", "limit"),
    [
        ("raise 1 3 forward", 5),
        ("die 1 3 backward", 5),
        ("thread 1 3 forward", 5),  # which does not end by itself
        ("atexit 1 3 forward", 5),
        ("exit0 1 3 forward", 8),
        ("stop 1 3 forward timeout_seconds=3", 3 + 5),
    ],
)
def test_a_job_ends_soon_after_a_tower_has(words: str, limit: float, promise: Promise) -> None:
    result, took = unwell(3, *words.split(), code=None)
    assert result.returncode != 0
    promise(took, limit)


@pytest.mark.parametrize("mode", ["stubborn", "stubborn-fail"])
def test_a_job_ends_soon_though_its_towers_handle_signals(mode: str, promise: Promise) -> None:
    process = start_command(["mirrored", "run", "--towers", "2", TOLD, mode])
    process.stdout.readline()
    if mode == "stubborn":
        process.terminate()
        assert process.stdout.readline() == "told\n"
        process.terminate()
    began = time.monotonic()
    process.communicate()
    promise(time.monotonic() - began, 5)


@pytest.mark.parametrize(
    ("starter", "code"),
    [("run", EXIT_PREEMPTED), ("launch", EXIT_PREEMPTED), ("torchrun", 1), ("TF_CONFIG", EXIT_PREEMPTED)],
)
def test_a_job_that_has_saved_ends_soon_though_a_pool_of_each_tower_goes_on(
    starter: str, code: int, tmp_path: pathlib.Path, promise: Promise
) -> None:
    jobs = told_to_end(starter, tmp_path / "run", "pool", "all")
    began = time.monotonic()
    for job in jobs:
        job.communicate()
    took = time.monotonic() - began
    assert {job.returncode for job in jobs} == {code}
    assert list((tmp_path / "run").glob("step-*"))
    promise(took, 8)


def test_towers_end_soon_after_the_death_of_their_torchrun(promise: Promise) -> None:
    process = start_program(["-m", "torch.distributed.run", "--nproc-per-node", "2", TOLD, "stubborn"])
    towers = [int(word) for word in process.stdout.readline().split()]
    began = time.monotonic()
    process.kill()
    process.wait()
    await_ends(*towers)
    promise(time.monotonic() - began, 5)
