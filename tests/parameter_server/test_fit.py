"""Keras' ``fit`` with parameter servers: asynchronous, and with the numbers of one device when it is synchronous."""

from __future__ import annotations

import gc
import importlib.util
import os
import pathlib
import re
import signal
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.programs import end_of, run_program, start_program
from tests.support.waiting import forever, wait_until

if not (importlib.util.find_spec("ray") and importlib.util.find_spec("keras")):
    pytest.skip("needs Ray and Keras", allow_module_level=True)

pytestmark = pytest.mark.extended

import mirrored.keras  # noqa: E402

# isort: split
import keras  # noqa: E402

import mirrored  # noqa: E402
from mirrored.parameter_server.partitioners import FixedShardsPartitioner  # noqa: E402
from tests.parameter_server.processes import descendants  # noqa: E402

EXAMPLES, BATCH = 56, 8
STEPS = EXAMPLES // BATCH
X = np.random.default_rng(0).normal(size=(EXAMPLES, 6)).astype("float32")
Y = (X[:, :1] > 0).astype("float32")


@pytest.fixture(autouse=True)
def free() -> Iterator[None]:
    """Ends the workers and servers of a test, which Keras' models keep until garbage is collected."""
    yield
    gc.collect()


class Counted(keras.metrics.Metric):  # type: ignore[misc]
    """The number of examples."""

    def __init__(self, name: str = "examples") -> None:
        super().__init__(name=name)
        self.seen = self.add_weight(name="seen", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.seen.assign_add(float(len(y_true)))

    def result(self) -> Any:
        return self.seen.value


def model_of(optimizer: Any, normalised: bool = False) -> Any:
    keras.utils.set_random_seed(1)
    normalisation = [keras.layers.BatchNormalization()] if normalised else []
    layers = [keras.layers.Dense(5, "tanh"), *normalisation, keras.layers.Dense(1, "sigmoid")]
    model = keras.Sequential([keras.layers.Input((6,)), *layers])
    model.compile(optimizer, "binary_crossentropy", metrics=["accuracy", Counted()])
    return model


def values_of(model: Any) -> dict[str, Any]:
    """The variables of a model and its optimizer, by names that do not depend on other models."""
    model_values = {f"model {i}": v.numpy() for i, v in enumerate(model.variables)}
    return model_values | {f"optimizer {i}": v.numpy() for i, v in enumerate(model.optimizer.variables)}


def assert_close(one: dict[str, Any], other: dict[str, Any], rtol: float = 1e-4) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_allclose(value, other[name], rtol=rtol, atol=1e-6, err_msg=name)


def synchronous(**options: Any) -> mirrored.ParameterServerStrategy:
    return mirrored.ParameterServerStrategy(workers=2, servers=2, replicas_to_aggregate=2, seed=0, **options)


SCHEDULE: Callable[[], Any] = lambda: keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.7)  # noqa: E731
OPTIMIZERS = {
    "SGD, a schedule of the rate": lambda: keras.optimizers.SGD(SCHEDULE(), momentum=0.9),
    "AdamW": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "averages of the weights": lambda: keras.optimizers.Adam(0.01, use_ema=True, ema_overwrite_frequency=3),
    "a number of its own": lambda: keras.optimizers.Nadam(0.01),
    "accumulated gradients": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_synchronous_steps_are_those_of_one_device(name: str) -> None:
    arguments = {"epochs": 2, "verbose": 0, "validation_data": (X[:20], Y[:20])}
    one = model_of(OPTIMIZERS[name]())
    expected = one.fit(X, Y, batch_size=2 * BATCH, **arguments).history
    with synchronous(variable_partitioner=FixedShardsPartitioner(2)).scope():
        model = model_of(OPTIMIZERS[name]())
    found = model.fit(X, Y, batch_size=BATCH, **arguments).history
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, rel=1e-5), key
    assert_close(values_of(model), values_of(one))


def test_statistics_of_batch_normalization_are_those_of_towers(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "values.npz"
    run_program([__file__, "towers", str(path)], env={"PYTHONPATH": os.getcwd()}, code=0)
    with synchronous().scope():
        model = model_of(keras.optimizers.SGD(0.1), normalised=True)
    model.fit(X[:48], Y[:48], batch_size=BATCH, epochs=2, verbose=0)
    assert_close(values_of(model), dict(np.load(path)))


def on_towers(path: str) -> None:
    strategy = mirrored.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = model_of(keras.optimizers.SGD(0.1), normalised=True)
    model.fit(X[:48], Y[:48], batch_size=2 * BATCH, epochs=2, verbose=0)
    if strategy.is_chief:
        np.savez(path, **values_of(model))


class Killed(keras.layers.Layer):  # type: ignore[misc]
    """A layer in which the first worker that sees the example waits to be killed."""

    def __init__(self, path: pathlib.Path, example: Any) -> None:
        super().__init__()
        self._file, self._example = path, example

    def call(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor) and not self._file.exists() and bool((x[:, 0] == float(self._example)).any()):
            unfinished = self._file.with_suffix(".unfinished")
            unfinished.write_text(str(os.getpid()))
            unfinished.rename(self._file)
            forever()
        return x


def test_a_killed_worker_loses_no_step(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "worker"
    strategy = mirrored.ParameterServerStrategy(workers=3, servers=2, seed=0)
    with strategy.scope():
        keras.utils.set_random_seed(1)
        layers = [Killed(path, X[20, 0]), keras.layers.Dense(1, "sigmoid")]
        model = keras.Sequential([keras.layers.Input((6,)), *layers])
        model.compile("adam", "binary_crossentropy", metrics=[Counted()])

    class Killer(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if batch == 3:
                wait_until(path.exists)
                os.kill(int(path.read_text()), signal.SIGKILL)

    history = model.fit(X, Y, batch_size=BATCH, epochs=1, shuffle=False, verbose=0, callbacks=[Killer()]).history
    history2 = model.fit(X, Y, batch_size=BATCH, epochs=3, verbose=0).history
    assert history["examples"] == [EXAMPLES]
    assert history2["examples"] == [EXAMPLES] * 3
    assert int(model.optimizer.iterations) == 4 * STEPS


class Own(keras.Model):  # type: ignore[misc]
    """A model with its own training step, which reads its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        loss = keras.ops.mean(keras.ops.square(self(x) - y))
        self.zero_grad()
        loss.backward()
        variables = self.trainable_variables
        with torch.no_grad():
            self.optimizer.apply_gradients((v.value.grad, v) for v in variables)
        return {"own": loss, "rate": float(self.optimizer.learning_rate)}


def test_a_step_of_its_own_with_data_of_each_worker() -> None:
    strategy = mirrored.ParameterServerStrategy(workers=2, servers=1, seed=0)
    with strategy.scope():
        model = Own()
        model.compile(keras.optimizers.SGD(0.1, clipnorm=0.5))

    def make_data(context: mirrored.InputContext) -> Iterator[Any]:
        generator = np.random.default_rng(context.input_pipeline_id)
        while True:
            x = generator.normal(size=(BATCH, 6)).astype("float32")
            yield x, x[:, :1] * 2

    rates = []

    class Rates(keras.callbacks.Callback):  # type: ignore[misc]
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            rates.append(logs["rate"])
            self.model.optimizer.learning_rate = 0.1 / (epoch + 2)

    with pytest.raises(ValueError, match="set steps_per_epoch"):
        model.fit(make_data, verbose=0)
    history = model.fit(make_data, steps_per_epoch=40, epochs=3, verbose=0, callbacks=[Rates()]).history
    assert history["own"][-1] < 1  # about 5 without training
    assert rates == pytest.approx([0.1, 0.05, 0.1 / 3])
    assert int(model.optimizer.iterations) == 120


def test_a_dropped_model_ends_its_workers() -> None:
    strategy = mirrored.ParameterServerStrategy(workers=1, servers=1)
    with strategy.scope():
        model = model_of("adam")
    model.fit(X, Y, batch_size=BATCH, verbose=0)
    assert values_of(model)
    references = weakref.ref(strategy), weakref.ref(model)
    del strategy, model
    # a worker's thread refers to the coordinator until its call has ended
    wait_until(lambda: gc.collect() >= 0 and all(reference() is None for reference in references))


def test_batches_one_by_one_and_weights_from_a_file(tmp_path: pathlib.Path) -> None:
    with mirrored.ParameterServerStrategy(workers=1, servers=2).scope():
        model = model_of("adam")
    one = model_of("adam")
    for start in (0, BATCH):
        rows = slice(start, start + BATCH)
        found = model.train_on_batch(X[rows], Y[rows], return_dict=True)
        expected = one.train_on_batch(X[rows], Y[rows], return_dict=True)
        assert found == pytest.approx(expected, rel=1e-5)
    assert_close(values_of(model), values_of(one))
    one.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    one.save_weights(path := tmp_path / "one.weights.h5")
    model.load_weights(path)
    one.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    model.fit(X, Y, batch_size=BATCH, shuffle=False, verbose=0)
    assert_close(values_of(model), values_of(one))
    assert model.predict(X, verbose=0) == pytest.approx(one.predict(X, verbose=0), rel=1e-4)


def test_what_cannot_be() -> None:
    with synchronous(variable_partitioner=FixedShardsPartitioner(2)).scope():
        scaled = model_of(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)))
        constrained = keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(1, kernel_constraint="max_norm")])
        constrained.compile("sgd", "mse")
        counted = model_of("sgd")
    with pytest.raises(TypeError, match="cannot step a LossScaleOptimizer"):
        scaled.fit(X, Y, verbose=0)
    with pytest.raises(ValueError, match="kernel has a constraint, which needs the whole variable"):
        constrained.fit(X, Y, verbose=0)
    counted._compile_metrics._user_metrics[-1].seen._aggregation = "none"
    with pytest.raises(TypeError, match="counts cannot be combined"):
        counted.fit(X, Y, verbose=0)
    with mirrored.OneDeviceStrategy().scope():
        plain = model_of("sgd")
    with pytest.raises(TypeError, match="give model.fit the result of strategy.distribute_datasets_from_function"):
        plain.fit(lambda context: [(X, Y)], verbose=0)


def resumed(folder: str, epochs: str) -> None:
    with mirrored.ParameterServerStrategy(workers=2, servers=2, seed=0).scope():
        model = model_of("adam")
    saving = mirrored.keras.Checkpoints(folder, every_steps=3)
    told = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: print("epoch", epoch, flush=True))
    model.fit(X, Y, batch_size=BATCH, epochs=int(epochs), verbose=0, callbacks=[saving, told])
    print("steps", int(model.optimizer.iterations), "examples", model.history.history["examples"])


def test_a_lost_server_resumes_from_a_checkpoint(tmp_path: pathlib.Path) -> None:
    program = [__file__, "resumed", str(tmp_path)]
    process = start_program([*program, "100000"], env={"PYTHONPATH": os.getcwd()})
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("epoch 3"):
            break
    below = descendants(process.pid)
    os.kill(next(n for n, command in below.items() if command.startswith("ray::Server")), signal.SIGKILL)
    _, errors = end_of(process, 1)
    assert re.search(r"ServerLostError: parameter server [01] .* ended, and with it ", errors)
    saved = max(int(path.name.removeprefix("step-")) for path in tmp_path.glob("step-*"))
    epochs = saved // STEPS + 2
    again = run_program([*program, str(epochs)], env={"PYTHONPATH": os.getcwd()}, code=0)
    assert f"(step {saved})" in again.stderr
    assert f"steps {epochs * STEPS} examples {[float(EXAMPLES)] * epochs}" in again.stdout


if __name__ == "__main__":
    import sys

    {"towers": on_towers, "resumed": resumed}[sys.argv[1]](*sys.argv[2:])
