"""Tools that follow a training, for models that are sharded over the towers."""

from __future__ import annotations

import json
import pathlib
import re

import pytest

from tests.support.programs import run_program

pytestmark = pytest.mark.extended

SCRIPT = """
import os, signal, sys, pathlib
import torch, torch.nn.functional as F
from torch import nn
import mirrored

folder, dies = sys.argv[1], "dies" in sys.argv
strategy = mirrored.MirroredStrategy(seed=0)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x):
        return x + torch.tanh(self.layer(x))

with strategy.scope():
    model = nn.Sequential(Block(), Block(), nn.Linear(16, 1))
strategy.shard(model, [Block])
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
x = torch.randn(66, 16)
data = strategy.distribute_dataset((x, x.sum(1)), 10, shuffle=True)

def step(x, y):
    optimizer.zero_grad()
    loss = mirrored.compute_average_loss(F.mse_loss(model(x)[:, 0], y, reduction="none"))
    loss.backward()
    optimizer.step()
    return loss.detach()

monitor = mirrored.Monitor(strategy, every=4, gradient_norm=True, jsonl=f"{folder}/monitor.jsonl")
objects = {"model": model, "optimizer": optimizer, "data": data, "monitor": monitor}
intervals = {"every_steps": 2, "memory_every_steps": 1}
checkpoints = mirrored.CheckpointManager(strategy, f"{folder}/run", objects, **intervals, asynchronous=False)
killed = pathlib.Path(folder, "killed")
with checkpoints.resume(), monitor:
    for _ in data.epochs(2):
        for batch in data:
            loss = strategy.run(step, args=batch)
            monitor.step(loss)
            checkpoints.step()
            if dies and checkpoints.steps == 5 and strategy.topology.index == 1 and not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            last = strategy.reduce("sum", loss)
strategy.print(f"loss {last:.5f}")
"""


@pytest.fixture
def script(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def run(script: pathlib.Path, *words: str, towers: int = 2, folder: str = "a") -> str:
    place = script.parent / folder
    place.mkdir(exist_ok=True)
    devices = ",".join(f"cpu:{tower}" for tower in range(towers))
    command, *rest = words or ("run",)
    own = [word for word in rest if word != "dies"]
    program = ["-m", "mirrored", command, "--devices", devices, *own, str(script), str(place)]
    result = run_program([*program, *(["dies"] if "dies" in rest else [])])
    return result.stdout + result.stderr


def loss_in(output: str) -> str:
    (loss,) = re.findall(r"loss (\d+\.\d{5})$", output, re.MULTILINE)
    return str(loss)


def test_a_job_restarts_and_ends_with_the_numbers_of_one_device(script: pathlib.Path) -> None:
    expected = loss_in(run(script, towers=1, folder="one"))
    output = run(script, "run", "--restarts", "1", "dies")
    assert "tower 1 was ended by SIGKILL after step 5" in output
    assert re.search(r"resuming from .*step-00000004", output)
    assert loss_in(output) == expected
    assert (
        output.count("memory_every_steps is without effect, checkpoints are on the disk only: a model is sharded") == 2
    )


def test_a_monitor_has_the_numbers_of_one_device(script: pathlib.Path) -> None:
    rows = []
    for towers in (1, 2):
        run(script, towers=towers, folder=str(towers))
        lines = (script.parent / str(towers) / "monitor.jsonl").read_text().splitlines()
        rows.append([json.loads(line) for line in lines])
    assert len(rows[0]) == len(rows[1]) > 2
    assert rows[0][0].keys() >= {"loss", "gradient_norm", "learning_rate"}
    for one, two in zip(*rows, strict=True):
        for name in {"loss", "gradient_norm", "learning_rate"} & one.keys():  # the last report has no norm
            assert one[name] == pytest.approx(two[name], rel=1e-4), name


def test_verify_compares_sharded_parameters_and_gradients(script: pathlib.Path) -> None:
    output = run(script, "verify")
    assert "5 steps compared" in output
    assert "The same: losses, gradients and parameters are equal" in output


def test_verify_finds_a_loss_that_is_not_scaled(script: pathlib.Path) -> None:
    text = SCRIPT.replace(
        'mirrored.compute_average_loss(F.mse_loss(model(x)[:, 0], y, reduction="none"))',
        "F.mse_loss(model(x)[:, 0], y)",
    )
    assert text != SCRIPT
    script.write_text(text)
    output = run(script, "verify")
    assert "compute_average_loss" in output
    assert "The same" not in output
