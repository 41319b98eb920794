"""The import of mirrored.keras: which Keras it takes, and what it changes there."""

from __future__ import annotations

import inspect
import pathlib
import subprocess
import sys

import pytest

from tests.support.jobs import ROOT
from tests.support.programs import run_program
from tests.support.waiting import HANG

REFUSED = """
import os, sys
def refused():
    sys.modules.pop("mirrored.keras", None)
    try:
        import mirrored.keras
    except ImportError as error:
        print(error)
os.environ["KERAS_BACKEND"] = "tensorflow"
refused()
os.environ["KERAS_BACKEND"] = "torch"
sys.modules["keras"] = None
refused()
del sys.modules["keras"], os.environ["KERAS_BACKEND"]
import mirrored.keras
"""
TRAINS = """
import keras, numpy as np, inspect
keras.utils.set_random_seed(3)
model = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(1)])
model.compile("adam", "mse", metrics=["mae"])
x = np.random.default_rng(0).normal(size=(50, 4))
history = model.fit(x, x[:, :1], batch_size=16, epochs=3, verbose=0)
print(keras.config.backend(), [weight.tolist() for weight in model.get_weights()])
print(history.history, model.predict(x, verbose=0).sum())
print([str(inspect.signature(function)) for function in (keras.Model.fit, keras.layers.BatchNormalization.__init__)])
"""
ALSO_REFUSED = """
for version in ("3.12.1", "3.16.0"):
    keras.__version__ = version
    refused()
keras.config.backend = lambda: "jax"
refused()
"""


@pytest.fixture(scope="module")
def printed() -> list[str]:
    """What a new Python prints, in which nobody has loaded Keras or chosen its backend: one for all tests.

    What is refused first, a training after the import, and what is refused then.
    """
    paths = f"{ROOT / 'tests' / 'support' / 'startup'}:{ROOT}"
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": paths, "HOME": "/nowhere"}
    environment["TPU_SKIP_MDS_QUERY"] = "1"  # else torch_tpu, where it is installed, takes minutes to find no TPU
    command = [sys.executable, "-c", REFUSED + TRAINS + ALSO_REFUSED]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 8, lines
    return lines


@pytest.mark.extended
def test_what_it_does_not_take(printed: list[str]) -> None:
    """Other backends and versions, each an ImportError that says what to do."""
    lines = printed[:2] + printed[5:]
    assert "KERAS_BACKEND is 'tensorflow': set KERAS_BACKEND=torch" in lines[0]
    assert "pip install 'keras>=3.13,<3.16'" in lines[1]
    assert "knows Keras 3.13 to 3.15, but this is 3.12.1: pip install" in lines[2]
    assert "this is 3.16.0. Keras 3.16 wraps models in DistributedDataParallel" in lines[3]
    assert "imported before with the backend jax: put 'import mirrored.keras' before 'import keras'" in lines[4]


@pytest.mark.extended
def test_a_model_without_a_strategy_is_left_to_keras(printed: list[str], tmp_path: pathlib.Path) -> None:
    """Weights, losses and signatures are those of a Keras that was not changed."""
    script = tmp_path / "plain.py"
    script.write_text(TRAINS + 'import sys\nassert "mirrored.keras" not in sys.modules')
    plain = run_program([str(script)], env={"KERAS_BACKEND": "torch"}, code=0)
    assert plain.stdout.splitlines() == printed[2:5]
    assert printed[2].startswith("torch ")  # which the import has chosen


def test_what_is_replaced_calls_the_original() -> None:
    import mirrored.keras.computations  # noqa: F401  (replaces it)
    import mirrored.keras.keras_private as private

    replaced = private.loss.reduce_values
    assert inspect.unwrap(replaced).__module__ == "keras.src.losses.loss"
    assert inspect.signature(replaced) == inspect.signature(inspect.unwrap(replaced))
