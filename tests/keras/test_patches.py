"""The import of mirrored.keras: which Keras it takes, and what it changes there."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from tests.support.jobs import ROOT


def run(program: str, backend: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": "/nowhere"}
    if backend is not None:
        environment["KERAS_BACKEND"] = backend
    return subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=100)


def test_it_chooses_torch() -> None:
    result = run("import mirrored.keras, keras; print(keras.config.backend())")
    assert result.stdout == "torch\n", result.stderr


@pytest.mark.parametrize(
    ("program", "backend", "words"),
    [
        ("import mirrored.keras", "tensorflow", "KERAS_BACKEND is 'tensorflow': set KERAS_BACKEND=torch"),
        (
            "import keras; keras.config.backend = lambda: 'jax'; import mirrored.keras",  # jax itself is not installed
            "torch",
            "keras was imported before with the backend jax: put 'import mirrored.keras' before 'import keras'",
        ),
        (
            "import keras; keras.__version__ = '3.16.0'; import mirrored.keras",
            "torch",
            "this is 3.16.0. Keras 3.16 wraps models in DistributedDataParallel",
        ),
        ("import keras; keras.__version__ = '3.12.1'; import mirrored.keras", "torch", "knows Keras 3.13 to 3.15, but"),
        ("import sys; sys.modules['keras'] = None; import mirrored.keras", None, "pip install 'mirrored[keras]'"),
    ],
)
def test_what_it_does_not_take(program: str, backend: str | None, words: str) -> None:
    result = run(program, backend)
    assert result.returncode == 1
    assert words in result.stderr.splitlines()[-1]


def test_a_model_without_a_strategy_is_left_to_keras() -> None:
    """Weights, losses and signatures are those of a Keras that was not changed."""
    program = """
{}
import os; os.environ["KERAS_BACKEND"] = "torch"
import keras, numpy as np, inspect
keras.utils.set_random_seed(3)
model = keras.Sequential([keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(1)])
model.compile("adam", "mse", metrics=["mae"])
x = np.random.default_rng(0).normal(size=(50, 4))
history = model.fit(x, x[:, :1], batch_size=16, epochs=3, verbose=0)
print([weight.tolist() for weight in model.get_weights()], history.history, model.predict(x, verbose=0).sum())
print([str(inspect.signature(function)) for function in (keras.Model.fit, keras.layers.BatchNormalization.__init__)])
"""
    changed, plain = run(program.format("import mirrored.keras")), run(program.format(""), "torch")
    assert plain.returncode == 0, plain.stderr
    assert changed.stdout == plain.stdout


def test_what_is_replaced_calls_the_original() -> None:
    import mirrored.keras.keras_private as private
    import mirrored.keras.losses  # noqa: F401  (replaces it)

    replaced = private.losses.reduce_values
    assert inspect.unwrap(replaced).__module__ == "keras.src.losses.loss"
    assert inspect.signature(replaced) == inspect.signature(inspect.unwrap(replaced))
