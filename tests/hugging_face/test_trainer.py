"""Hugging Face's Trainer on towers: the losses, weights and metrics of one device, by every way to start."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest

from tests.support.jobs import Settings, launch
from tests.support.programs import run_program

pytest.importorskip("transformers", reason="scripts/test --extras has it")
pytest.importorskip("peft", reason="scripts/test --extras has it")
pytestmark = pytest.mark.extended

Results = dict[str, dict[str, Any]]

CLOSE = 2e-5
"""The losses of transformers are of float32, also for models of float64, and Adam divides by small gradients.

On one machine, weights differed by 1.4e-6 at most. A wrong weight of a tower's loss changes them by 1e-3.
"""


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Results:
    from tests.hugging_face import trainings

    return launch(trainings.run_all, str(tmp_path_factory.mktemp("one")), True, count=1)[0]


@pytest.mark.parametrize("towers", [1, 2, 3])
def test_losses_weights_and_metrics_of_one_device(one: Results, tmp_path: pathlib.Path, towers: int) -> None:
    from tests.hugging_face import trainings

    for found in launch(trainings.run_all, str(tmp_path), False, count=towers):
        assert found.keys() == one.keys()
        assert_close(found, one)


def assert_close(found: Results, one: Results) -> None:
    for case, results in found.items():
        expected = one[case]
        assert len(results["history"]) == len(expected["history"]), case
        for entry, wanted in zip(results["history"], expected["history"], strict=True):
            assert entry == pytest.approx(wanted, abs=CLOSE), case
        for name, value in expected["weights"].items():
            np.testing.assert_allclose(results["weights"][name], value, rtol=0, atol=CLOSE, err_msg=case)
        np.testing.assert_array_equal(results["labels"], expected["labels"], err_msg=case)
        assert results["loss"] == pytest.approx(expected["loss"], abs=CLOSE), case


@pytest.mark.parametrize(
    ("settings", "hosts"),
    [({"shard_optimizer": True}, ""), ({"shard_optimizer": True}, "ab"), ({"central": True}, "")],
    ids=str,
)
def test_with_other_strategies(one: Results, tmp_path: pathlib.Path, settings: Settings, hosts: str) -> None:
    from tests.hugging_face import trainings

    for found in launch(trainings.with_strategy, str(tmp_path), settings, hosts):
        assert_close(found, one)


@pytest.mark.parametrize(("towers", "hosts"), [(2, ""), (3, ""), (4, "aabb")])
def test_sharded_models_have_the_numbers_of_one_device(
    one: Results, tmp_path: pathlib.Path, towers: int, hosts: str
) -> None:
    from tests.hugging_face import trainings

    for found in launch(trainings.sharded, str(tmp_path), hosts, count=towers):
        assert_close(found, one)


def test_checkpoints_of_sharded_models_are_those_of_one_device(tmp_path: pathlib.Path) -> None:
    from tests.hugging_face import trainings

    expected, *_ = launch(trainings.resumed_by, str(tmp_path / "one"), None, False, count=1)
    for resumed_at, shard, towers in ((None, True, 3), (3, True, 2), (6, False, 2), (9, True, 3), (9, False, 1)):
        for found in launch(trainings.resumed_by, str(tmp_path / "sharded"), resumed_at, shard, count=towers):
            for name, value in expected.items():
                np.testing.assert_allclose(found[name], value, rtol=0, atol=CLOSE, err_msg=name)


@pytest.mark.parametrize(("towers", "shards"), [(2, False), (3, False), (2, True)])
def test_trl_has_the_numbers_of_one_device(tmp_path: pathlib.Path, towers: int, shards: bool) -> None:
    pytest.importorskip("trl", reason="scripts/test --extras has it")
    from tests.hugging_face import trainings

    (expected, weights), *_ = launch(trainings.fine_tuned, str(tmp_path), True, count=1)
    history, found = launch(trainings.fine_tuned, str(tmp_path), False, shards, count=towers)[0]
    assert len(history) == len(expected)
    for entry, wanted in zip(history, expected, strict=True):
        assert entry == pytest.approx(wanted, abs=CLOSE)
    for name, value in weights.items():
        np.testing.assert_allclose(found[name], value, rtol=0, atol=CLOSE, err_msg=name)


def test_private_names_exist() -> None:
    """Those of transformers and accelerate that mirrored/transformers.py uses."""
    import transformers
    from accelerate.state import PartialState

    methods = ["_get_dataloader", "_get_num_items_in_batch", "_save_checkpoint", "_save_rng_state"]
    methods += ["_load_rng_state", "_save", "_save_optimizer_and_scheduler", "_load_optimizer_and_scheduler"]
    assert all(callable(getattr(transformers.Trainer, name)) for name in methods)
    assert callable(vars(transformers.trainer)["skip_first_batches"])
    arguments = transformers.TrainingArguments("results", report_to=[])
    assert arguments.device == vars(arguments)["_setup_devices"]
    assert arguments.n_gpu == arguments._n_gpu
    state = arguments.distributed_state
    assert isinstance(state, PartialState)
    assert (state.process_index, state.local_process_index) == (arguments.process_index, arguments.local_process_index)


def test_a_resumed_run_ends_with_the_same_bits(tmp_path: pathlib.Path) -> None:
    from tests.hugging_face import trainings

    for whole, continued, files in launch(trainings.resumed, str(tmp_path)):
        for name, value in whole.items():
            np.testing.assert_array_equal(continued[name], value, err_msg=name)
        assert {"model.safetensors", "optimizer.pt", "rng_state.pth", "trainer_state.json"} <= set(files)


def test_settings_that_towers_do_not_support_are_errors() -> None:
    from tests.hugging_face import trainings

    words = ("omit virtual_towers", "batch_eval_metrics=…", "'inputs'", "auto_find_batch_size=…")
    for errors in launch(trainings.refused):
        for error, word in zip(errors, words, strict=True):
            assert word in error


def test_losses_that_are_no_means_are_errors() -> None:
    from tests.hugging_face import trainings

    for errors in launch(trainings.wrong_losses):
        assert all("neither a mean over examples or labels" in error for error in errors), errors


def test_the_arguments_may_be_left_out(tmp_path: pathlib.Path) -> None:
    from tests.hugging_face import trainings

    assert launch(trainings.without_arguments, str(tmp_path)) == [(True, "tmp_trainer")] * 2


PROGRAM = """\
import sys
from mirrored.transformers import Trainer
from tests.hugging_face import trainings

trainer = trainings.language(Trainer, sys.argv[1])
trainer.train()
if trainer.is_world_process_zero():
    print("towers", trainer.strategy.num_replicas_in_sync, "loss", trainer.state.log_history[-2]["eval_loss"])
"""


WAYS = (
    ["-m", "mirrored", "run", "--towers", "2"],
    ["-m", "torch.distributed.run", "--nproc-per-node", "2"],
    ["-m", "mirrored", "cluster", "--workers", "2"],
)


@pytest.mark.parametrize("way", WAYS, ids=lambda words: words[1])
def test_the_same_script_in_every_way(one: Results, tmp_path: pathlib.Path, way: list[str]) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    output = run_program([*way, str(program), str(tmp_path / "results")], code=0).stdout
    (line,) = [line for line in output.splitlines() if "towers 2 loss" in line]
    assert float(line.split()[-1]) == pytest.approx(one["language"]["history"][-2]["eval_loss"], abs=CLOSE)
