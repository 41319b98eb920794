"""Lightning's Trainer on towers: the weights, losses and metrics of one device, by every way to start."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch

import mirrored
from mirrored.verification.causes import Cause
from tests.support.jobs import launch
from tests.support.programs import run_program

pytest.importorskip("lightning", reason="scripts/test --extras has it")
pytestmark = pytest.mark.extended

CLOSE = 1e-10

REFUSED = (
    *("a list cannot be split among 2 towers", "object", "leave the group out", "give seed to"),
    *("share of the global mean already", "virtual_towers", "omit synchronize"),
)

PROGRAM = """\
import sys

import lightning as L
import torch
from torch.utils.data import DataLoader

from mirrored.lightning import MirroredLightningStrategy


class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1, dtype=torch.float64)

    def training_step(self, batch, index):
        if "fail" in sys.argv and self.global_rank == 1 and index == 1:
            raise RuntimeError("the disk is full")
        loss = self.layer(batch).square().mean()
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


strategy = MirroredLightningStrategy(seed=0, **eval(sys.argv[1]))
model = Model()
examples = torch.randn(11, 3, dtype=torch.float64)
plain = {"enable_checkpointing": False, "enable_model_summary": False}
trainer = L.Trainer(strategy=strategy, max_epochs=2, enable_progress_bar=False, logger=False, **plain)
trainer.fit(model, DataLoader(examples, 4, shuffle=True))
if trainer.is_global_zero:  # torchrun mixes what its towers print
    print("towers", trainer.world_size, "weights", *model.layer.weight.flatten().tolist(), trainer.callback_metrics)
"""


@pytest.fixture
def program(tmp_path: pathlib.Path) -> pathlib.Path:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    return script


def assert_same(found: Any, expected: Any) -> None:
    (weights, losses, metrics), (one_weights, one_losses, one_metrics) = found, expected
    for weight, one in zip(weights, one_weights, strict=True):
        torch.testing.assert_close(weight, one, rtol=0, atol=CLOSE)
    assert losses == pytest.approx(one_losses, abs=CLOSE)
    assert metrics == pytest.approx(one_metrics, abs=CLOSE)


def test_a_fit_has_the_numbers_of_one_device() -> None:
    """On 3 towers, with uneven and empty shares: weights, statistics, losses of each step, metrics of epochs."""
    from tests.lightning.modules import all_kinds

    [one] = launch(all_kinds, {}, count=1)
    for options in ({}, {"shard_optimizer": True}):
        for tower in launch(all_kinds, options, count=3):
            for kind, found in tower.items():
                assert_same(found, one[kind])
    assert len(one["plain"][1]) == 12
    assert "accuracy" in one["plain"][2]


@pytest.mark.parametrize("sharded", [False, True])
def test_a_fit_goes_on_where_a_checkpoint_was_saved(tmp_path: pathlib.Path, sharded: bool) -> None:
    """Lightning's own, of the chief: to the bit, after an epoch and in the middle of one."""
    from tests.lightning.modules import interrupted

    for tower in launch(interrupted, str(tmp_path), {"shard_optimizer": sharded}):
        for name in ("after an epoch", "within an epoch"):
            for weight, whole in zip(tower[name][0], tower["whole"][0], strict=True):
                assert torch.equal(weight, whole), name
    assert len(list(tmp_path.rglob("last.ckpt"))) == 2


def test_what_towers_do_together(tmp_path: pathlib.Path) -> None:
    from tests.lightning.modules import together

    results = launch(together, str(tmp_path), count=2)
    for tower, result in enumerate(results):
        assert result["place"] == (tower, tower, 0, 2, tower == 0)
        assert result["broadcast"] == ["of 1", None, 1.5]
        assert result["reduced"] == [0.5, 1.0]
        assert result["gathered"].tolist() == [[0.0], [1.0]]
        assert result["decisions"] == [False, True]
        assert result["validated"] == results[0]["validated"]
        assert all(words in text for text, words in zip(result["refused"], REFUSED, strict=True)), result["refused"]
    assert [len(result["predicted"]) for result in results] == [7, 6]


def test_all_ways_to_start(program: pathlib.Path) -> None:
    """With a last batch of 3 examples."""
    one = weights_of(run_program([str(program), "{}"], code=0).stdout, 1)
    ways = {
        "mirrored run": ["-m", "mirrored", "run", "--towers", "2", str(program), "{}"],
        "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(program), "{}"],
        "TF_CONFIG": ["-m", "mirrored", "cluster", "--workers", "2", str(program), "{}"],
    }
    for way, words in ways.items():
        found = weights_of(run_program(words, code=0, cwd=str(program.parent)).stdout, 2)
        assert found == pytest.approx(one, abs=CLOSE), way


def weights_of(output: str, towers: int) -> list[float]:
    words = next(line for line in output.splitlines() if "weights" in line).partition("weights")
    assert f"towers {towers}" in words[0], output
    return [float(word) for word in words[2].split("{")[0].split()]


def test_a_failure_on_one_tower_ends_all(program: pathlib.Path) -> None:
    result = run_program(["-m", "mirrored", "run", "--towers", "2", str(program), "{}", "fail"])
    assert result.returncode == 1, result.stderr
    last = result.stderr.splitlines()[-1]
    assert last == "mirrored: tower 1 failed in step 2, in the step's function: RuntimeError: the disk is full"


def test_it_says_what_is_missing() -> None:
    code = "import sys; sys.modules.update({'lightning': None, 'lightning.pytorch': None}); import mirrored.lightning"
    result = run_program(["-c", code], code=1)
    assert "mirrored.lightning needs Lightning: pip install" in result.stderr


@pytest.mark.parametrize("automatic", [True, False])
def test_a_stand_in_is_not_logged(automatic: bool) -> None:
    """On six towers, some have no example in either batch. The last batch has the example 5 alone."""
    from tests.lightning.modules import logged

    for count in (1, 2, 3, 6):
        for found in launch(logged, automatic, count=count):
            for name, value in {"sum": 15, "max": 5, "min": 1, "mean": 3, "total": 15}.items():
                assert found[f"{name}_epoch"] == found[f"val_{name}_epoch"] == value, (count, name)
                assert found[f"{name}_step"] == 5, (count, name)


def test_verify_names_the_argument_that_a_log_lacks(tmp_path: pathlib.Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.replace("sync_dist=True, ", "").replace("eval(sys.argv[1])", "{}"))
    report = mirrored.verify(script)
    assert report.causes == (Cause.PRINTED_VALUE,), report
    assert "give sync_dist=True to self.log" in str(report)


def test_a_sharded_module_has_the_numbers_of_one_device(tmp_path: pathlib.Path) -> None:
    """A fit that resumes from Lightning's checkpoint has them, too. One device can read that checkpoint."""
    from tests.lightning.modules import Classifier, Sharded, sharded

    [one] = launch(sharded, str(tmp_path / "one"), Classifier, count=1)
    for tower in launch(sharded, str(tmp_path / "three"), Sharded, count=3):
        assert_same(tower["whole"], one["whole"])
        assert_same(tower["rest"], one["rest"])
    saved, expected = (torch.load(tmp_path / name / "last.ckpt") for name in ("three", "one"))
    for name, value in expected["state_dict"].items():
        torch.testing.assert_close(saved["state_dict"][name], value, rtol=0, atol=CLOSE)
