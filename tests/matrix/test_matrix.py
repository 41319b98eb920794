"""TensorFlow's table: each strategy with each way of training, compared with one device.

The scripts are in the same folder. The TPUs are simulated. Estimators never had ``TPUStrategy`` (they had
``TPUEstimator``), but here ``train_and_evaluate`` is the same for all strategies.
"""

from __future__ import annotations

import importlib.util
import json
import pathlib

import pytest

from tests import simulated_device
from tests.accelerator.server import variables_of
from tests.support.jobs import ROOT
from tests.support.programs import run_program

pytestmark = pytest.mark.extended

WAYS = ("fit", "custom_loop", "train_and_evaluate")
STRATEGIES = (
    *("MirroredStrategy", "TPUStrategy", "MultiWorkerMirroredStrategy"),
    *("CentralStorageStrategy", "OneDeviceStrategy"),
)


def losses(way: str, strategy: str, folder: pathlib.Path) -> list[float]:
    """What a script prints."""
    script = [str(ROOT / "tests" / "matrix" / f"{way}.py"), strategy, str(folder)]
    words = ["-m", "mirrored", "cluster", "--workers", "2"] if strategy == "MultiWorkerMirroredStrategy" else []
    variables = variables_of("tpu") if strategy == "TPUStrategy" else {}
    paths = [str(ROOT), variables.get("PYTHONPATH", "")]
    result = run_program([*words, *script], env={**variables, "PYTHONPATH": ":".join(filter(None, paths))}, code=0)
    towers = {"OneDeviceStrategy": "", "MultiWorkerMirroredStrategy": "2 towers of 2 workers"}
    assert towers.get(strategy, "2 towers") in result.stderr
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("losses ")]
    values: list[float] = json.loads(line.removeprefix("losses "))
    return values


@pytest.fixture(scope="module", params=WAYS)
def one(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[float]]:
    if request.param == "fit" and not importlib.util.find_spec("keras"):
        pytest.skip("needs Keras")
    return request.param, losses(request.param, "OneDeviceStrategy", tmp_path_factory.mktemp("one"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_cell_has_the_losses_of_one_device(
    strategy: str, one: tuple[str, list[float]], tmp_path: pathlib.Path
) -> None:
    if strategy == "TPUStrategy" and (reason := simulated_device.why_not()):
        pytest.skip(str(reason))
    way, expected = one
    assert expected[-1] < expected[0]
    assert losses(way, strategy, tmp_path) == pytest.approx(expected, rel=1e-4)
