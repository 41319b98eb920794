"""What Keras does on several towers beyond numbers: run by ``launch``, each function on every tower."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import signal
import warnings
from collections.abc import Callable
from typing import Any, ClassVar

os.environ["KERAS_BACKEND"] = "torch"

import keras
import numpy as np
import torch
from keras import layers, ops
from torch.utils.data import DataLoader, TensorDataset

import mirrored.keras
from tests.keras.cases import classes, dense, numbers, seven_batches
from tests.keras.own_metrics import Extreme
from tests.support.jobs import trace_no_backward


def begin() -> mirrored.Strategy:
    strategy = mirrored.MirroredStrategy(seed=0)
    keras.utils.set_random_seed(7)
    return strategy


def own_batch_norm_and_dropout() -> dict[str, Any]:
    """Weights; what each tower's dropout drew; and a layer that counts in each way of aggregation."""

    class Counting(layers.Layer):
        def build(self, shape: Any) -> None:
            self.ways = {
                how: self.add_weight(shape=(), initializer="zeros", trainable=False, aggregation=how, name=how)
                for how in ("sum", "mean", "only_first_replica")
            }

        def call(self, x: Any) -> Any:
            if str(x.device) != "meta":
                tower = mirrored.get_replica_context().replica_id_in_sync_group
                for variable in self.ways.values():
                    variable.assign(variable + 10.0**tower * x.shape[0])
            return x

    class Kept(layers.Layer):
        drawn: ClassVar[list[Any]] = []

        def call(self, x: Any) -> Any:
            if str(x.device) != "meta":
                self.drawn.append(ops.convert_to_numpy(x)[:2])
            return x

    strategy = begin()
    with strategy.scope():
        kept, counting = Kept(), Counting()
        model = keras.Sequential(
            [layers.Input((8,)), layers.BatchNormalization(), layers.Dropout(0.5), kept, counting, layers.Dense(3)]
        )
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    x, y = np.ones((20, 8)), classes()[:20]
    model.fit(x + numbers(8)[:20], y, batch_size=5, epochs=2, verbose=0)
    kept.drawn.clear()
    model.layers[0].trainable = False
    model.fit(x, y, batch_size=4, epochs=1, verbose=0)
    ways = {how: float(variable.numpy()) for how, variable in counting.ways.items()}
    return {"weights": model.get_weights(), "drawn": np.array(kept.drawn), "ways": ways}


def boards(folder: str) -> dict[str, Any]:
    """What of TensorBoard's files can be read, and what Keras' callback says."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # no other tower waits for it

    strategy = begin()
    model = dense(strategy)
    callbacks = [
        mirrored.keras.TensorBoard(folder, histogram_freq=2, update_freq=5),
        keras.callbacks.CSVLogger(os.path.join(folder, "log.csv")),
        mirrored.keras.Checkpoints(os.path.join(folder, "checkpoints")),
    ]
    x, y = seven_batches()
    for epochs in (2, 3):  # the second goes on
        model.fit(x, y, batch_size=16, epochs=epochs, validation_split=0.2, callbacks=callbacks, verbose=0)
    strategy.barrier()
    found: dict[str, Any] = {"error": error_of(callback_of_keras_for_tensorboard)}
    for part in ("train", "validation"):
        events = EventAccumulator(os.path.join(folder, part)).Reload()
        found[part] = {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
        found[f"histograms of {part}"] = len(events.Tags()["histograms"])
    return found


def callbacks_and_files(folder: str) -> dict[str, Any]:
    """What each tower printed, the files, and how far training went when tower 1 alone says stop."""

    class StopsOnOneTower(keras.callbacks.Callback):
        def __init__(self, at: int) -> None:
            super().__init__()
            self.at, self.batches = at, 0

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.batches += 1
            if self.batches == self.at and strategy.topology.index == 1:
                self.model.stop_training = True

    class Rows(keras.callbacks.CSVLogger):  # type: ignore[misc]
        """The chief alone has it, and it follows batches, of validation too."""

        batches: ClassVar[list[float]] = []

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            self.batches.append(logs["loss"])

    strategy = begin()
    model = dense(strategy)
    model.build((None, 8))
    path = pathlib.Path(folder)
    x, y = seven_batches()
    printed = io.StringIO()
    callbacks: list[Any] = [
        keras.callbacks.ModelCheckpoint(path / "best.keras", "loss", save_best_only=True, verbose=1),
        keras.callbacks.ModelCheckpoint(path / "{epoch}-{batch}.weights.h5", save_weights_only=True, save_freq=5),
        Rows(path / "log.csv"),
        keras.callbacks.BackupAndRestore(path / "backup", save_freq=3, double_checkpoint=True, delete_checkpoint=False),
    ]
    with contextlib.redirect_stdout(printed), warnings.catch_warnings(record=True) as warned:
        history = model.fit(x, y, batch_size=16, epochs=2, callbacks=callbacks, validation_split=0.2)
    model.save(path / "saved.keras")
    model.save_weights(path / "saved.weights.h5")
    model.load_weights(path / "saved.weights.h5")
    strategy.reduce("sum", 0.0)
    files = sorted(file.name for file in path.iterdir())
    with strategy.scope():
        loaded = keras.models.load_model(path / "saved.keras")
    stops = StopsOnOneTower(3)
    loaded.fit(x, y, batch_size=16, epochs=9, callbacks=[stops], verbose=0)
    return {
        "printed": printed.getvalue(),
        "files": files,
        "lines": (path / "log.csv").read_text().splitlines(),
        "epochs": history.epoch,
        "warned": len(warned),
        "batches": stops.batches,
        "rows": len(Rows.batches),
        "weights": loaded.get_weights(),
    }


def restored(folder: str) -> tuple[list[int], list[Any]]:
    strategy = begin()
    model = dense(strategy)
    model.build((None, 8))
    callback = keras.callbacks.BackupAndRestore(pathlib.Path(folder) / "backup")
    history = model.fit(*seven_batches(), batch_size=16, epochs=4, callbacks=[callback], verbose=0)
    return history.epoch, model.get_weights()


def settings_of_compile() -> dict[str, Any]:
    """Weights and losses of models computed in several ways; what is compiled is small, as tracing takes long."""
    trace_no_backward()
    strategy = begin()
    found: dict[str, Any] = {}
    x, y = numbers(8).astype("float32")[:40], classes()[:40]
    settings: dict[str, dict[str, Any]] = {
        "plain": {},
        "eager": {"run_eagerly": True},
        "mixed_bfloat16": {},
        "mixed_float16": {},
        "small": {},
        "small, compiled": {"jit_compile": True},
    }
    for name, setting in settings.items():
        keras.utils.set_random_seed(7)
        keras.config.set_dtype_policy(name if "mixed" in name else "float32")
        model = dense(strategy, hidden=0 if "small" in name else 16, **setting)
        history = model.fit(x, y, batch_size=20, epochs=2, verbose=0)
        found[name] = [*model.get_weights(), np.array(history.history["loss"])]
    breaks = list(torch._dynamo.utils.counters["graph_break"])
    assert breaks, "Keras' own, at backward"
    assert not (traced := [text for text in breaks if "mirrored/keras/keras_private" in text]), traced
    return found


def strategies_one_after_the_other() -> list[float]:
    """The losses of a training by each, the first of which is still there."""
    losses, strategies = [], []
    for _ in range(2):
        strategies.append(begin())
        model = dense(strategies[-1])
        losses += model.fit(numbers(8), classes(), epochs=2, verbose=0).history["loss"]
    return losses


Mistake = Callable[[mirrored.Strategy], None]
MISTAKES: dict[str, tuple[Mistake, str]] = {}
"""By name: what is wrong, and the error that it is, as a regular expression."""


def mistake(error: str) -> Callable[[Mistake], Mistake]:
    def add(function: Mistake) -> Mistake:
        MISTAKES[function.__name__] = (function, error)
        return function

    return add


def fit(strategy: mirrored.Strategy, **settings: Any) -> None:
    dense(strategy, **settings).fit(numbers(8), classes(), verbose=0)


@mistake(r"MirrorError: model.fit of a model that was created outside strategy.scope\(\)")
def outside_of_the_scope(strategy: mirrored.Strategy) -> None:
    model = keras.Sequential([layers.Dense(3)])
    model.compile("sgd", "mse")
    model.fit(numbers(8), numbers(3), verbose=0)


@mistake(r"RuntimeError: model.fit was called inside strategy.run")
def inside_run(strategy: mirrored.Strategy) -> None:
    model = dense(strategy)
    strategy.run(lambda: model.fit(numbers(8), classes(), verbose=0))


@mistake(r"DisagreementError: the first batch of an epoch on tower 1 differs")
def other_data_on_each_tower(strategy: mirrored.Strategy) -> None:
    own, x, y = np.random.default_rng(strategy.topology.index), numbers(8), classes()
    batches = ((x[rows], y[rows]) for rows in (own.permutation(len(x))[:8] for _ in range(9)))
    dense(strategy).fit(batches, steps_per_epoch=2, verbose=0)


@mistake(r"TypeError: the metric 'counts' \(Counts\) has no variables")
def metric_without_variables(strategy: mirrored.Strategy) -> None:
    class Counts(keras.metrics.Metric):
        count = 0

        def update_state(self, y: Any, p: Any, sample_weight: Any = None) -> None:
            self.count += 1

        def result(self) -> Any:
            return ops.convert_to_tensor(float(self.count))

    fit(strategy, metrics=[Counts(name="counts")])


@mistake(r"TypeError: the variable 'extreme/value' .* has aggregation='none'")
def metric_that_is_not_combined(strategy: mirrored.Strategy) -> None:
    fit(strategy, metrics=[Extreme("none")])


@mistake(r"TypeError: the metric 'extreme' \(Extreme\) would be wrong on several towers")
def metric_of_a_maximum(strategy: mirrored.Strategy) -> None:
    fit(strategy, metrics=["accuracy", Extreme()])


@mistake(r"TypeError: the metric 'extreme' \(Extreme\) would be wrong on several towers")
def metric_of_mean_maxima(strategy: mirrored.Strategy) -> None:
    dense(strategy, metrics=[Extreme("mean")]).evaluate(numbers(8), classes(), verbose=0)


@mistake(r"TypeError: the metric 'extreme' .* for 2 examples .*strategy.gather\(y_pred")
def metric_of_the_last_value(strategy: mirrored.Strategy) -> None:
    dense(strategy, metrics=[Extreme(last=True)]).train_on_batch(numbers(8)[:3], classes()[:3])


@mistake(r"TypeError: the metric variable 'extreme/value' .*strategy.gather\(y_pred")
def metric_of_tower_0(strategy: mirrored.Strategy) -> None:
    fit(strategy, metrics=["accuracy", Extreme("only_first_replica")])


@mistake(r"TypeError: the metric 'largest' \(MeanMetricWrapper\) would be wrong")
def metric_that_is_a_function(strategy: mirrored.Strategy) -> None:
    def largest(y: Any, p: Any) -> Any:
        return ops.max(p)

    fit(strategy, metrics=[largest])


@mistake(r"ValueError: mirrored.keras.Checkpoints cannot resume in the middle")
def checkpoints_of_a_generator(strategy: mirrored.Strategy) -> None:
    batches = ((numbers(8), classes()) for _ in range(9))
    dense(strategy).fit(batches, callbacks=[mirrored.keras.Checkpoints("never")], verbose=0)


def callback_of_keras_for_tensorboard(strategy: mirrored.Strategy) -> None:
    dense(strategy).fit(numbers(8), classes(), callbacks=[keras.callbacks.TensorBoard()], verbose=0)


@mistake(r"MirrorError: SGD.step\(\) on tower \d uses gradients that no backward")
def gradients_that_are_given_to_apply(strategy: mirrored.Strategy) -> None:
    """In the first step, though no parameter has them."""

    class Model(keras.Sequential):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            loss = self.compute_loss(x, y, self(x, training=True))
            variables = self.trainable_weights
            assert self.optimizer.iterations == 0
            self.optimizer.apply(torch.autograd.grad(loss, [variable.value for variable in variables]), variables)
            return {"loss": loss}

    with strategy.scope():
        model = Model([layers.Dense(3, "softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy")
    model.fit(numbers(8), classes(), verbose=0)


@mistake(r"MirrorError: SGD.step\(\) on tower \d uses gradients that no backward")
def gradients_of_its_own(strategy: mirrored.Strategy) -> None:
    class Model(keras.Sequential):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            variables = self.trainable_weights
            loss = self.compute_loss(x, y, self(x, training=True))
            gradients = torch.autograd.grad(loss, [variable.value for variable in variables])
            for variable, gradient in zip(variables, gradients, strict=True):
                variable.value.grad = gradient
            self.optimizer.apply(gradients, variables)
            return {"loss": loss}

    with strategy.scope():
        model = Model([layers.Dense(3, "softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy")
    model.fit(numbers(8), classes(), verbose=0)


@mistake(r"RuntimeError: model.fit cannot be split into virtual towers")
def virtual_towers(_: mirrored.Strategy) -> None:
    fit(mirrored.MirroredStrategy(seed=0, virtual_towers=4))


def errors_of(names: list[str]) -> list[str]:
    """What a tower says to mistakes, one after the other."""
    return [error_of(MISTAKES[name][0]) for name in names]


def error_of(mistake: Mistake) -> str:
    try:
        mistake(begin())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def a_loop_of_ones_own(folder: str, steps: int) -> list[Any]:
    """Weights after some steps of Keras' optimizer in ``strategy.run``, which go on from the folder's checkpoint."""
    strategy = begin()
    with strategy.scope():
        model = keras.Sequential([layers.Input((8,)), layers.Dense(16, "relu"), layers.Dense(3)])
    optimizer = keras.optimizers.Adam(0.01)
    optimizer.build(model.trainable_variables)
    x, y = map(torch.from_numpy, seven_batches())
    train = strategy.distribute_dataset((x.float(), y), 16)
    objects = {"model": model, "optimizer": optimizer, "train": train}
    checkpoints = mirrored.CheckpointManager(strategy, folder, objects, every_steps=2)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> None:
        model.zero_grad()
        losses = torch.nn.functional.cross_entropy(model(x, training=True), y, reduction="none")
        mirrored.compute_average_loss(losses).backward()
        variables = model.trainable_variables
        optimizer.apply([variable.value.grad for variable in variables], variables)

    with checkpoints.resume():
        for _ in train.epochs(2):
            for x, y in train:
                strategy.run(train_step, args=(x, y))
                checkpoints.step()
                if checkpoints.steps == steps:
                    return model.get_weights()
    return model.get_weights()


def fit_with_checkpoints(folder: str, kind: str, killed_in: int) -> dict[str, Any]:
    """Trains five epochs of four batches; tower 0 is killed in a batch, or once an epoch's last one is saved."""
    strategy = begin()
    with strategy.scope():
        model = keras.Sequential(
            [layers.Input((8,)), layers.Dense(16), layers.Dropout(0.3), layers.BatchNormalization(), layers.Dense(3)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.05), loss, metrics=["accuracy"])

    class Dies(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if self.model.optimizer.iterations == killed_in != 12 and strategy.is_chief:
                os.kill(os.getpid(), signal.SIGKILL)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if self.model.optimizer.iterations == killed_in:
                checkpoints.manager.wait()
                if strategy.is_chief:
                    os.kill(os.getpid(), signal.SIGKILL)

    x, y, batch_size = numbers(8).astype("float32"), classes(), 16
    validation = (x[:30], y[:30])
    if kind == "loader":
        x = DataLoader(TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), batch_size=16, shuffle=True)
        y = batch_size = None
        validation = DataLoader(TensorDataset(*map(torch.from_numpy, validation)), batch_size=16)
    checkpoints = mirrored.keras.Checkpoints(folder, every_steps=3)
    callbacks = [
        checkpoints,
        Dies(),
        keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=0.13),
        keras.callbacks.EarlyStopping("loss", patience=3, restore_best_weights=True),
    ]
    settings = {"epochs": 5, "callbacks": callbacks, "verbose": 0}
    history = model.fit(x, y, batch_size=batch_size, validation_data=validation, **settings)
    return {"weights": model.get_weights(), "epochs": history.epoch, "history": history.history}
