"""Scripts on the simulated accelerator, as a user starts them."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import pytest

from tests import simulated_device
from tests.support.jobs import ROOT
from tests.support.programs import run_command, run_program
from tests.support.readme import blocks_of_readme, scripts_of_readme
from tests.support.waiting import HANG

SCRIPT = str(ROOT / "tests" / "programs" / "simulated.py")

pytestmark = [
    pytest.mark.skipif(bool(simulated_device.why_not()), reason=str(simulated_device.why_not())),
    pytest.mark.extended,
]


@pytest.mark.parametrize(
    ("run", "words", "started_by"),
    [
        (run_program, [SCRIPT], "python"),
        (run_command, ["torchrun", "--standalone", "--nproc-per-node", "2", SCRIPT], "torchrun"),
    ],
    ids=["python", "torchrun"],
)
def test_every_device_is_used(run: Any, words: list[str], started_by: str) -> None:
    simulated = run(words, timeout=HANG)
    assert simulated.returncode == 0, simulated.stderr
    assert simulated.stdout.startswith("devices [0, 1], loss ")
    assert "2 towers on a simulated device, shared memory, staged by the host" in simulated.stderr
    assert f"started by {started_by}" in simulated.stderr
    said = "gradients go through the hosts' memory: torch has no collectives between sims"
    assert simulated.stderr.count(said) == 1


def test_the_script_of_the_readme(tmp_path: pathlib.Path) -> None:
    """It creates its model on the CPU."""
    (tmp_path / "train.py").write_text(scripts_of_readme()["train"])
    paths = os.pathsep.join([str(ROOT), str(simulated_device.INSTALLED)])
    result = run_program(["train.py"], cwd=str(tmp_path), env={"PYTHONPATH": paths}, code=0)
    assert "2 towers on a simulated device" in result.stderr
    assert result.stdout == blocks_of_readme()[1].partition("by mirrored run\n")[2]


def test_two_towers_share_a_device() -> None:
    # The program of torch that starts towers does not know "sim" and is not asked: the variable names the devices.
    result = run_program([SCRIPT], env={"TOWERS_DEVICES": "sim:0,sim:0"}, code=0)
    assert result.stdout.startswith("devices [0, 0], loss ")
    assert result.stderr.count("gradients go through the hosts' memory: so it was asked, or towers share a dev") == 1


def test_a_job_goes_on_without_a_device_that_is_lost(tmp_path: pathlib.Path) -> None:
    """The device is one that torch loads by itself, as others have to be found by the agent, too."""
    (tmp_path / "sim-1.dist-info").mkdir()
    (tmp_path / "sim-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: sim\nVersion: 1\n")
    (tmp_path / "sim-1.dist-info/entry_points.txt").write_text("[torch.backends]\nsim = tests.simulated_device:load\n")
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": paths, "SIMULATED_LOST": str(tmp_path / "lost")}
    words = ["mirrored", "run", "--restarts", "1", "--min-towers", "1"]
    script = str(ROOT / "tests" / "programs" / "simulated_restarts.py")
    result = run_command([*words, script, str(tmp_path)], env=variables, code=0)
    assert result.stdout == "2 after step 0\n1 after step 2\nhas ended after step 6\n"
    assert "mirrored: 1 of 2 towers continue, on the devices that are left\n" in result.stderr


def test_verify() -> None:
    result = run_program([str(ROOT / "tests" / "programs" / "verifies_simulated.py"), SCRIPT], code=0)
    assert "The same: losses" in result.stdout, result.stdout + result.stderr
