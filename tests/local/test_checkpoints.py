"""A run of local steps that was killed between two synchronisations ends in the bits of one that was not."""

from __future__ import annotations

import hashlib
import os
import pathlib
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mirrored
from mirrored.checkpoint.errors import CheckpointError
from mirrored.checkpoint.manifest import name_of
from tests.support.jobs import all_raise, make_data, make_mlp, parameters_of, towers
from tests.support.programs import run_program
from tests.support.steps import averaging_step

WAYS = [mirrored.LocalSGD(4), mirrored.DiLoCo(4)]


def train(strategy: mirrored.Strategy, folder: str, every: int = 3, stop: int | None = None, kill: bool = False) -> Any:
    """Train 9 steps, to be synchronised after every four, or until ``stop``; what this tower then has, as a checksum.

    Args:
        every: steps from one checkpoint to the next.
        kill: tower 1 is killed at ``stop``.
    """
    with strategy.scope():
        model = nn.Sequential(make_mlp(), nn.BatchNorm1d(3, dtype=torch.float64))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    data = strategy.distribute_dataset(make_data(22), 8, shuffle=True)
    objects = {"model": model, "optimizer": optimizer, "data": data}
    checkpoints = mirrored.CheckpointManager(strategy, folder, objects, every_steps=every)
    step = averaging_step(model, optimizer)
    restored = checkpoints.restore_newest()
    for _ in data.epochs(3):
        for x, y in data:
            strategy.run(step, args=(x, y))
            checkpoints.step()
            if checkpoints.steps == stop:
                checkpoints.wait()
                strategy.barrier()
                if kill and strategy.topology.index == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                return _digest(model, optimizer), parameters_of(model), restored
    checkpoints.wait()
    return _digest(model, optimizer), parameters_of(model), restored


def _digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    tensors: list[Tensor] = [*model.state_dict().values()]
    tensors += [value for state in optimizer.state_dict()["state"].values() for value in state.values()]
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


@pytest.mark.extended
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_run_that_was_saved_anywhere_goes_on_with_the_same_bits(
    tmp_path: pathlib.Path, way: mirrored.LocalSGD, count: int
) -> None:
    settings = {"synchronize": way}
    whole = towers(train, str(tmp_path / "a"), 100, count=count, settings=settings)
    for stop in (3, 4, 6):  # between two synchronisations, at one, and between again
        towers(train, str(tmp_path / "b"), 1, stop, count=count, settings=settings)
    resumed = towers(train, str(tmp_path / "b"), 100, count=count, settings=settings)
    assert resumed[0][2].step == 6
    assert [digest for digest, _, _ in resumed] == [digest for digest, _, _ in whole]
    assert len({digest for digest, _, _ in whole}) == count  # optimizers' states are each tower's own


SCRIPT = """
import sys
import mirrored
from tests.local.test_checkpoints import train
if __name__ == "__main__":
    strategy = mirrored.MirroredStrategy(["cpu:0", "cpu:1"], seed=0, synchronize=mirrored.DiLoCo(4))
    digest, *_ = train(strategy, sys.argv[1], 1, stop=int(sys.argv[2]) or None, kill=bool(int(sys.argv[2])))
    print(strategy.topology.index, digest)
"""


@pytest.mark.extended
def test_a_killed_tower_costs_nothing(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    killed = run_program([str(script), str(tmp_path / "a"), "6"])
    assert killed.returncode == 128 + signal.SIGKILL
    resumed = run_program([str(script), str(tmp_path / "a"), "0"], code=0)
    whole = run_program([str(script), str(tmp_path / "b"), "0"], code=0)
    assert "resuming from" in resumed.stderr
    assert sorted(resumed.stdout.split()) == sorted(whole.stdout.split())


def test_at_a_synchronisation_parameters_are_saved_once_and_another_number_of_towers_goes_on(
    tmp_path: pathlib.Path,
) -> None:
    settings = {"synchronize": mirrored.DiLoCo(4)}
    saved = towers(train, str(tmp_path), 4, 4, settings=settings)
    assert all(map(torch.equal, saved[0][1], saved[1][1]))
    assert b"model/0.0.weight@1" not in (tmp_path / name_of(4) / "tensors.safetensors").read_bytes()[:100_000]
    results = towers(train, str(tmp_path), 100, count=3, settings=settings)
    assert (results[0][2].step, results[0][2].towers) == (4, 2)
    towers(train, str(tmp_path / "b"), 1, 5, settings=settings)
    assert b"model/0.0.weight@1" in (tmp_path / "b" / name_of(5) / "tensors.safetensors").read_bytes()[:100_000]


@pytest.mark.row(69)
def test_the_checkpoint_of_another_way_is_refused(tmp_path: pathlib.Path) -> None:
    towers(train, str(tmp_path / "local"), 1, 2, settings={"synchronize": mirrored.LocalSGD(4)})
    words = "mirrored.local cannot load its state: ValueError: it was synchronised by LocalSGD, and is by DiLoCo here"
    diloco = {"synchronize": mirrored.DiLoCo(4)}
    all_raise(CheckpointError, words, train, str(tmp_path / "local"), settings=diloco)
    towers(train, str(tmp_path / "every"), 1, 2)
    all_raise(CheckpointError, "mirrored.local", train, str(tmp_path / "every"), settings=diloco)
