"""TensorFlow's table: each strategy with each way of training, compared with one device.

The scripts are in the same folder. The TPUs are simulated. Estimators never had ``TPUStrategy`` (they had
``TPUEstimator``), but here ``train_and_evaluate`` is the same for all strategies.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import pathlib
from collections.abc import Callable

import pytest

from tests import simulated_device
from tests.accelerator.server import variables_of
from tests.matrix.strategies import PARAMETER_SERVERS
from tests.support.clusters import free_ports
from tests.support.jobs import ROOT
from tests.support.programs import end_of, run_program, start_program
from tests.support.waiting import wait_until

pytestmark = pytest.mark.extended

WAYS = ("fit", "custom_loop", "train_and_evaluate")
STRATEGIES = (
    *("MirroredStrategy", "TPUStrategy", "MultiWorkerMirroredStrategy"),
    *("CentralStorageStrategy", PARAMETER_SERVERS, "OneDeviceStrategy"),
)
EXAMPLES, EVEN = 1500, 1472
"""With parameter servers, each step needs two batches of the same size."""


def losses(way: str, strategy: str, folder: pathlib.Path, examples: int) -> list[float]:
    """What a script prints."""
    served = strategy == PARAMETER_SERVERS
    name = "custom_loop_of_a_coordinator" if served and way == "custom_loop" else way
    script = [str(ROOT / "tests" / "matrix" / f"{name}.py"), strategy, str(folder), str(examples)]
    words = ["-m", "mirrored", "cluster", "--workers", "2"] if strategy == "MultiWorkerMirroredStrategy" else []
    result = run_program([*words, *script], env=variables_for(strategy), code=0)
    towers = {"OneDeviceStrategy": "", "MultiWorkerMirroredStrategy": "2 towers of 2 workers"}
    towers[PARAMETER_SERVERS] = "2 workers and 2 servers"
    assert towers.get(strategy, "2 towers") in result.stderr
    return losses_in(result.stdout)


def variables_for(strategy: str) -> dict[str, str]:
    variables = variables_of("tpu") if strategy == "TPUStrategy" else {}
    paths = [str(ROOT), variables.get("PYTHONPATH", "")]
    return {**variables, "PYTHONPATH": ":".join(filter(None, paths))}


def losses_in(output: str) -> list[float]:
    (line,) = [line for line in output.splitlines() if line.startswith("losses ")]
    values: list[float] = json.loads(line.removeprefix("losses "))
    return values


def skip_what_needs_more(strategy: str, way: str) -> None:
    if way == "fit" and not importlib.util.find_spec("keras"):
        pytest.skip("needs Keras")
    if strategy == PARAMETER_SERVERS and not importlib.util.find_spec("ray"):
        pytest.skip("scripts/test --extras has Ray")
    if strategy == "TPUStrategy" and (reason := simulated_device.why_not()):
        pytest.skip(str(reason))


Expected = Callable[[str, int], list[float]]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    """What a script prints on one device."""

    @functools.cache
    def losses_of_one(way: str, examples: int) -> list[float]:
        return losses(way, "OneDeviceStrategy", tmp_path_factory.mktemp("one"), examples)

    return losses_of_one


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_cell_has_the_losses_of_one_device(strategy: str, way: str, one: Expected, tmp_path: pathlib.Path) -> None:
    skip_what_needs_more(strategy, way)
    examples = EVEN if strategy == PARAMETER_SERVERS else EXAMPLES
    expected = one(way, examples)
    assert expected[-1] < expected[0]
    assert losses(way, strategy, tmp_path, examples) == pytest.approx(expected, rel=1e-4)


def cluster_of(strategy: str) -> dict[str, int]:
    """The tasks of a cluster with an evaluator."""
    if strategy == PARAMETER_SERVERS:
        return {"chief": 1, "worker": 2, "ps": 2, "evaluator": 1}
    return {"worker": 2 if strategy == "MultiWorkerMirroredStrategy" else 1, "evaluator": 1}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_cluster_with_an_evaluator_has_the_losses_of_one_device(
    strategy: str, one: Expected, tmp_path: pathlib.Path
) -> None:
    skip_what_needs_more(strategy, "train_and_evaluate")
    examples = EVEN if strategy == PARAMETER_SERVERS else EXAMPLES
    counts = cluster_of(strategy)
    ports = iter(free_ports(sum(counts.values())))
    cluster = {job: [f"127.0.0.1:{next(ports)}" for _ in range(count)] for job, count in counts.items()}
    script = [str(ROOT / "tests/matrix/train_and_evaluate.py"), strategy, str(tmp_path), str(examples)]
    tasks = {}
    for job, addresses in reversed(cluster.items()):
        for index in range(len(addresses)):
            config = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
            secret = {"MIRRORED_JOB_TOKEN": "a secret", "RAY_AUTH_TOKEN": ""}
            tasks[job, index] = start_program(script, env={**variables_for(strategy), "TF_CONFIG": config, **secret})
        if job == "evaluator":  # which would wait for a minute if the training had ended before
            wait_until((tmp_path / "evaluation" / "held").is_dir)
    outputs = {task: end_of(process, 0)[0] for task, process in tasks.items()}
    assert losses_in(outputs.pop(("evaluator", 0))) == pytest.approx(one("train_and_evaluate", examples), rel=1e-4)
    assert not any("losses" in output for output in outputs.values())
