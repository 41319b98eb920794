"""The examples, as a newcomer runs them, on real data."""

from __future__ import annotations

import pathlib
import re
import runpy
import sys

import pytest
import torch
from safetensors.torch import load_file

from tests.support.commands import Command, run_command
from tests.support.jobs import ROOT, run_program

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"


def is_png(path: pathlib.Path) -> bool:
    return path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 5000


@pytest.mark.slow
def test_digits_on_two_towers(tmp_path: pathlib.Path) -> None:
    words = [str(EXAMPLES / "digits.py"), "--devices", "cpu:0,cpu:1", "--output", str(tmp_path)]
    result = run_program([*words, "--checkpoints", str(tmp_path / "checkpoints")])
    assert result.returncode == 0, result.stderr
    match = re.search(r"test accuracy ([0-9.]+)% on 360 held-out digits", result.stdout)
    assert match, result.stdout
    assert float(match[1]) >= 97
    assert is_png(tmp_path / "digits.png")
    state = load_file(tmp_path / "model.safetensors")
    assert state["0.weight"].shape == (32, 1, 3, 3)
    assert all(torch.isfinite(tensor).all() for tensor in state.values())
    for part in ("28740/28740", "example/s", "loss=", "accuracy="):
        assert part in result.stderr, "the progress bar shows loss, accuracy and examples per second"
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
    assert saved == ["step-00000400", "step-00000460"]


@pytest.mark.slow
def test_dcgan_on_two_workers(tmp_path: pathlib.Path) -> None:
    words = ["mirrored", "cluster", str(EXAMPLES / "dcgan.py")]
    result = run_command([*words, "--epochs", "2", "--every", "1", "--output", str(tmp_path)])
    assert result.returncode == 0, result.stderr
    assert re.search(r"final losses: discriminator [0-9.]+, generator [0-9.]+", result.stdout)
    assert "2 towers of 2 workers on cpu" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epoch0001.png", "epoch0002.png"]


def test_keras_digits_on_two_towers(tmp_path: pathlib.Path) -> None:
    words = ["mirrored", "run", "--towers", "2", str(EXAMPLES / "keras_digits.py"), "--epochs", "3"]
    result = run_command([*words, "--output", str(tmp_path)])
    assert result.returncode == 0, result.stderr
    assert len(re.findall(r"^Epoch 3/3$", result.stdout, re.MULTILINE)) == 1
    match = re.search(r"test accuracy ([0-9.]+)% on 360 held-out digits", result.stdout)
    assert match, result.stdout
    assert float(match[1]) >= 85
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.keras", "epochs.csv"]
    assert len((tmp_path / "epochs.csv").read_text().splitlines()) == 4


def test_keras_transfer_on_two_towers() -> None:
    program = str(EXAMPLES / "keras_transfer.py")
    result = run_command(["mirrored", "run", "--towers", "2", program, "--epochs", "3"])
    assert result.returncode == 0, result.stderr
    accuracies = [float(text) for text in re.findall(r": ([0-9.]+)% of \d+ held-out digits", result.stdout)]
    assert len(accuracies) == 3
    assert min(accuracies) >= 50


def run_example(name: str, *words: str) -> None:
    sys.argv = [name, *words]
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.parametrize("name", ["digits.py", "dcgan.py", "keras_digits.py", "keras_transfer.py"])
def test_help(name: str) -> None:
    command = Command(run_example, name, "--help")
    output, _ = command.communicate()
    assert command.returncode == 0
    assert "--devices" in output
    assert "--epochs" in output


def test_a_failing_worker_ends_the_cluster() -> None:
    program = str(ROOT / "tests" / "programs" / "report.py")
    result = run_command(["mirrored", "cluster", program, "fail"])
    assert result.returncode == 1
    assert "[worker 1] ValueError: planned failure" in result.stderr
