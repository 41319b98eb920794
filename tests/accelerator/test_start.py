"""Scripts on the simulated accelerator, as a user starts them."""

from __future__ import annotations

from typing import Any

import pytest

from tests import simulated_device
from tests.support.commands import run_command
from tests.support.jobs import ROOT, run_program
from tests.support.waiting import HANG

SCRIPT = str(ROOT / "tests" / "programs" / "simulated.py")

pytestmark = [
    pytest.mark.skipif(bool(simulated_device.why_not()), reason=str(simulated_device.why_not())),
    pytest.mark.slow,
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


def test_two_towers_share_a_device() -> None:
    # The program of torch that starts towers does not know "sim" and is not asked: the variable names the devices.
    result = run_program([SCRIPT], env={"TOWERS_DEVICES": "sim:0,sim:0"}, timeout=HANG)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("devices [0, 0], loss ")
    assert result.stderr.count("gradients go through the hosts' memory: so it was asked, or towers share a dev") == 1


def test_verify() -> None:
    result = run_program([str(ROOT / "tests" / "programs" / "verifies_simulated.py"), SCRIPT], timeout=HANG)
    assert result.returncode == 0, result.stderr
    assert "The same: losses" in result.stdout, result.stdout + result.stderr
