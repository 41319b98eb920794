"""Ray Train as a way to start: towers are the workers of a TorchTrainer, as they are torchrun's."""

from __future__ import annotations

import os
import pathlib
import runpy
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import mirrored
from tests.support.jobs import ROOT, launch

ray = pytest.importorskip("ray")
pytest.importorskip("pandas", reason="Ray Train needs it")

from ray.train import FailureConfig, RunConfig, ScalingConfig, WorkerGroupError  # noqa: E402
from ray.train.torch import TorchTrainer  # noqa: E402

STEPS = 8


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    os.environ.setdefault("RAY_AUTH_TOKEN", "a secret of the tests, which Ray would write to a file")
    ray.init("local", num_cpus=2, include_dashboard=False)
    yield
    ray.shutdown()


def train(config: dict[str, Any]) -> None:
    """Train, and leave what came of it in a file of each tower; tower 1 kills itself once, where that is asked for."""
    strategy = mirrored.MirroredStrategy(seed=0)
    with strategy.scope():
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(number: int) -> None:
        inputs = torch.full((2, 3), float(number + strategy.topology.index))
        optimizer.zero_grad()
        mirrored.compute_average_loss(model(inputs).square().squeeze(1), global_batch_size=4).backward()
        optimizer.step()

    manager = mirrored.CheckpointManager(strategy, f"{config['folder']}/run", {"model": model, "optimizer": optimizer})
    restored = manager.restore_newest()
    first = 0 if restored is None else restored.step
    for number in range(first, STEPS):
        strategy.run(step, args=(number,))
        manager.step()
        manager.save(wait=True)
        killed = pathlib.Path(config["folder"], "killed")
        if config["kill"] and number == 4 and strategy.topology.index == 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    result = {"first": first, "weight": model.weight.detach(), "started_by": strategy.topology.started_by}
    torch.save(result, f"{config['folder']}/result{strategy.topology.index}")


def run(folder: pathlib.Path, *, kill: bool = False) -> list[dict[str, Any]]:
    """What a TorchTrainer's two workers leave."""
    TorchTrainer(
        train,
        train_loop_config={"folder": str(folder), "kill": kill},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(folder / "ray"), failure_config=FailureConfig(max_failures=1)),
    ).fit()
    return [torch.load(folder / f"result{tower}") for tower in range(2)]


def weight_of(folder: str) -> torch.Tensor:
    train({"folder": folder, "kill": False})
    return torch.load(f"{folder}/result{os.environ['RANK']}")["weight"]


def test_its_numbers_are_those_of_other_ways_to_start(tmp_path: pathlib.Path) -> None:
    results = run(tmp_path)
    launched = launch(weight_of, str(tmp_path / "launched"))
    for result in results:
        assert all(torch.equal(result["weight"], weight) for weight in launched)


CATCHES = ["except RuntimeError", "suppress", "exit", "finally"]


def catch(config: dict[str, Any]) -> None:
    """Run the program, in each of Ray's attempts with the next way to catch errors."""
    tries = pathlib.Path(config["folder"], f"tries{os.environ['RANK']}")
    with tries.open("a+") as file:
        file.seek(0)
        how = CATCHES[len(file.readlines())]
        file.write(f"{how}\n")
    sys.argv = ["it", "forward", how]
    runpy.run_path(str(ROOT / "tests" / "programs" / "catches.py"))


def test_a_script_that_catches_the_errors_of_towers_fails(tmp_path: pathlib.Path) -> None:
    trainer = TorchTrainer(
        catch,
        train_loop_config={"folder": str(tmp_path)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=str(tmp_path), failure_config=FailureConfig(max_failures=len(CATCHES) - 1)),
    )
    with pytest.raises(WorkerGroupError):
        trainer.fit()
    for tower in range(2):
        assert (tmp_path / f"tries{tower}").read_text().splitlines() == CATCHES


def test_workers_that_ray_starts_again_resume_from_our_checkpoint(tmp_path: pathlib.Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = run(tmp_path / "whole")[0]["weight"]
    for result in run(tmp_path, kill=True):
        assert 1 <= result["first"] <= 5
        assert torch.equal(result["weight"], whole)
    assert (tmp_path / "killed").exists()
