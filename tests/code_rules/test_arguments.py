"""Every argument of a public class is equal on all towers, or is declared to be each tower's own.

docs/reference/options.md shows the table. A new argument must be added here, with a decision.
"""

from __future__ import annotations

import inspect
import pathlib
import signal
from typing import Any

import pytest
import torch

import mirrored
from mirrored.evaluation import EarlyStopping, Evaluator, Exporter
from mirrored.variables import Variable
from tests.support.jobs import ROOT, all_raise

JOIN, START, USE, TOWER_0, OWN, NO = (
    "compared when the towers join",
    "compared when the object is created",
    "compared at the first use",
    "taken from tower 0",
    "each tower's own",
    "not data of the training",
)

MANAGER = {
    "strategy": NO,
    **dict.fromkeys(("folder", "objects", "keep", "every_steps", "every_seconds", "memory_every_steps"), START),
    **dict.fromkeys(("asynchronous", "grace_seconds", "signals"), START),
    "disk": OWN,
}
STRATEGY = {
    "devices": OWN,
    "communication": JOIN,
    **dict.fromkeys(("shard_optimizer", "virtual_towers", "mirror_check_interval", "nonfinite_gradients"), START),
    **dict.fromkeys(("synchronize", "seed"), START),
    **dict.fromkeys(("restarts", "min_towers"), JOIN),
}
TABLE: dict[Any, dict[str, str]] = {
    mirrored.MirroredStrategy: STRATEGY,
    mirrored.MultiWorkerMirroredStrategy: {"cluster_resolver": JOIN, "options": START},
    mirrored.TPUStrategy: {"cluster_resolver": JOIN, "options": START},
    mirrored.CentralStorageStrategy: {"compute_devices": OWN, "parameter_device": OWN, "options": START},
    mirrored.OneDeviceStrategy: dict.fromkeys(("device", "virtual_towers", "seed"), OWN),
    mirrored.Strategy.distribute_dataset: {
        "self": NO,
        **dict.fromkeys(("dataset", "global_batch_size", "shuffle", "drop_last", "seed"), USE),
        **dict.fromkeys(("stand_in", "batch_dims", "collate_fn"), OWN),
        "num_workers": OWN,
    },
    mirrored.CheckpointManager: MANAGER,
    mirrored.Monitor: {
        **dict.fromkeys(("strategy", "total", "show", "jsonl", "writer", "trackers"), NO),
        **dict.fromkeys(("every", "loss", "gradient_norm", "flops"), START),
        "peak_flops": OWN,
    },
    Evaluator: {
        "strategy": NO,
        **dict.fromkeys(("folder", "models", "name", "exporters", "stop", "timeout_seconds", "throttle_secs"), START),
        "evaluate": USE,  # its result
    },
    Exporter: dict.fromkeys(("name", "metric", "higher_is_better"), START),
    EarlyStopping: dict.fromkeys(("metric", "max_steps", "min_steps", "higher_is_better"), START),
    Variable: {
        **dict.fromkeys(("strategy", "check_here", "name"), NO),
        "value": TOWER_0,
        **dict.fromkeys(("synchronization", "aggregation", "dtype"), START),
    },
    mirrored.LocalSGD: {"every": START},
    mirrored.DiLoCo: {"every": START, "outer": USE},
    mirrored.PowerSGD: dict.fromkeys(inspect.signature(mirrored.PowerSGD).parameters, JOIN),
    mirrored.CommunicationOptions: dict.fromkeys(inspect.signature(mirrored.CommunicationOptions).parameters, JOIN),
}


@pytest.mark.parametrize("owner", TABLE, ids=lambda owner: owner.__qualname__)
def test_every_argument_is_in_the_table(owner: Any) -> None:
    assert set(inspect.signature(owner).parameters) == set(TABLE[owner])


def manage(strategy: mirrored.Strategy, folder: str, changed: dict[str, Any]) -> None:
    options: dict[str, Any] = {"folder": folder, "objects": {"a": {}}, **changed} if strategy.is_chief else {}
    mirrored.CheckpointManager(strategy, **{"folder": folder, "objects": {"a": {}}, **options})


@pytest.mark.parametrize(("name", "value"), [("folder", "another"), ("objects", {"b": {}})])
def test_the_folder_and_the_objects_of_a_manager_are_compared(name: str, value: object, tmp_path: pathlib.Path) -> None:
    check_compared(name, value, tmp_path)


def check_compared(name: str, value: object, tmp_path: pathlib.Path) -> None:
    words = rf"mirrored.CheckpointManager: {name} is .* on tower 0, but .* on tower 1; give all towers one"
    all_raise(mirrored.DisagreementError, words, manage, str(tmp_path / "run"), {name: value}, same=True)


@pytest.mark.extended
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("keep", 3),
        ("every_steps", 2),
        ("every_seconds", 2.0),
        ("memory_every_steps", 2),
        ("asynchronous", False),
        ("grace_seconds", 2.0),
        ("signals", [signal.SIGUSR1]),
    ],
)
def test_settings_of_a_manager_are_compared(name: str, value: object, tmp_path: pathlib.Path) -> None:
    check_compared(name, value, tmp_path)


def evaluate(strategy: mirrored.Strategy, folder: str, changed: dict[str, Any]) -> None:
    options: dict[str, Any] = {"folder": folder, "models": {"model": torch.nn.Linear(1, 1)}, "evaluate": dict}
    Evaluator(strategy, **options, **(changed if strategy.is_chief else {}))


def test_settings_of_an_evaluator_are_compared(tmp_path: pathlib.Path) -> None:
    changed = {"stop": EarlyStopping("loss", 10)}
    words = r"mirrored.evaluation.Evaluator: stop is .*'max_steps': 10.* on tower 0, but None on tower 1"
    all_raise(mirrored.DisagreementError, words, evaluate, str(tmp_path), changed, same=True)


def differ_in_the_seed(strategy: mirrored.Strategy) -> None:
    mirrored.MirroredStrategy(seed=strategy.topology.index)


def test_seeds_are_compared() -> None:
    words = "the strategy: seed is 0 on tower 0, but 1 on tower 1; give all towers one"
    all_raise(mirrored.DisagreementError, words, differ_in_the_seed, same=True)


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs/reference/options.md").read_text().partition("## Equal on all towers")[2]
    for when in (JOIN, START, USE, TOWER_0, OWN):
        assert f"| {when} |" in page, when
