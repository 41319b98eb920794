"""Keras' trainer under a strategy: ``fit``, ``evaluate``, ``predict`` and their methods for one batch.

Keras' own loops run on every tower. Only the function for one step is replaced. It receives this tower's share of the
batch (:mod:`mirrored.keras.data`) and calls Keras' function inside ``strategy.run``. Afterwards, the towers combine the
values that the step has changed.

[Note: logs are reduced when they are read] A step returns this tower's logs. They are reduced over the towers at the
end of an epoch and of ``evaluate``. In between, they are reduced only when they are read: by a callback that follows
batches (in every batch), or by the progress bar (about a hundred times per epoch). All towers determine the readers
identically.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import pathlib
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import keras

from mirrored.context import refuse_inside_run, strategy_with_towers
from mirrored.interceptor import interceptor
from mirrored.keras import callbacks as tower_callbacks
from mirrored.keras import data, keras_private
from mirrored.keras.callbacks import Monitor
from mirrored.keras.checkpoints import Checkpoints, note_strategy, strategy_of
from mirrored.keras.keras_private import CallbackList, TorchTrainer, Trainer, around
from mirrored.keras.training import Training
from mirrored.strategy.base import Strategy
from towers.collectives.agreement import announce
from towers.errors import MirrorError
from towers.system.messages import get_logger

log = get_logger("mirrored")

_UPDATES_OF_THE_BAR = 100


def _training_of(model: Any) -> Training | None:
    """Returns a model's training under its strategy, or None without a strategy."""
    strategy = strategy_of(model)
    if strategy is None:
        return None
    training: Training | None = keras_private.attached(model, "training")
    if training is None or training.strategy is not strategy:
        training = _kind_of_training(strategy)(model, strategy)
        keras_private.attach(model, "training", training)
    return training


def _kind_of_training(strategy: Strategy) -> Any:
    if not hasattr(strategy, "coordinator"):
        return Training
    from mirrored.keras.served import ServedTraining  # needs Ray

    return ServedTraining


def _checked_training_of(model: Any, call: str) -> Training | None:
    """Returns a model's training under its strategy for a method that trains, or None without a strategy.

    Raises:
        MirrorError: there are several towers, and the model does not belong to their strategy.
        RuntimeError: inside ``strategy.run``; or with virtual towers or ``synchronize=``.
    """
    training = _training_of(model)
    if training is None:
        if strategy_with_towers() is not None:
            raise MirrorError(
                f"model.{call} of a model that was created outside strategy.scope(): every tower would train a "
                "separate model. Create and compile the model inside 'with strategy.scope():', or call "
                "strategy.mirror(model)"
            )
        return None
    refuse_inside_run(f"model.{call}", "call it outside, it runs its steps itself")
    if training.strategy.virtual_towers is not None:
        raise RuntimeError(
            f"model.{call} cannot be split into virtual towers: Keras' train_step computes one loss of all "
            "examples that it receives, and steps its optimizer in the same call. Omit virtual_towers, or train "
            "the model with a custom function that calls strategy.backward"
        )
    if training.strategy.engine.local is not None:
        raise RuntimeError(
            f"model.{call} with synchronize=: Keras evaluates between two synchronisations, when the towers' "
            "parameters differ. Omit synchronize, or train the model with a custom function"
        )
    return training


@around(Trainer, "__init__")
def _init(original: Any, model: Any) -> None:
    original(model)
    note_strategy(model)


@around(Trainer, "compile")
def _compile(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    if strategy_of(model) is None:
        note_strategy(model)
    return original(model, *args, **kwargs)


@around(Trainer, "_symbolic_build")
def _symbolic_build(original: Any, model: Any, *args: Any, **kwargs: Any) -> None:
    if data.running is None:
        original(model, *args, **kwargs)
    else:
        data.running.builds = True
        original(model, *args, **kwargs)
        data.running.builds = False
    training = _training_of(model)
    if training is not None and training.several:
        knows = training.strategy.engine.recorder.knows
        if not all(knows(variable.value) for variable in model.variables):
            training.strategy.mirror(model)


@around(Trainer, "reset_metrics")
def _reset_metrics(original: Any, model: Any) -> None:
    original(model)
    training = _training_of(model)
    if training is not None and training.defers:
        training.forget()


@around(Trainer, "_get_metrics_result_or_logs")
def _get_metrics_result_or_logs(original: Any, model: Any, logs: Any) -> Any:
    training = _training_of(model)
    if training is not None and data.running is not None and data.running.strategy is training.strategy:
        reduced = training.reduce() if training.defers else {}
        # There are no logs if all batches of the epoch were run before the checkpoint.
        logs = reduced or logs or model.get_metrics_result()
        interceptor().returned("the logs of Keras' loop", logs)
    return original(model, logs)


@around(TorchTrainer, "fit", "evaluate", "predict")
def _loop(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Splits the batches among the towers."""
    fits = original.__name__ == "fit"
    training = _checked_training_of(model, "fit") if fits else _training_of(model)
    if training is None:
        return original(model, *args, **kwargs)
    strategy, signature = training.strategy, inspect.signature(original)
    extra = {key: kwargs.pop(key) for key in list(kwargs) if key not in signature.parameters}
    bound = signature.bind(model, *args, **kwargs)
    bound.apply_defaults()
    arguments = {key: value for key, value in bound.arguments.items() if key not in ("self", "kwargs")}
    reads_every = _reads_every(arguments)
    if training.several:
        arguments["callbacks"] = tower_callbacks.for_tower(strategy, arguments["callbacks"], fits)
        if not strategy.is_chief:
            arguments["verbose"] = 0
        if not fits:  # fit announces itself, when its callbacks are known
            _announce_call(strategy, original.__name__, sys._getframe(2))
    with training.loop(reads_every), warnings.catch_warnings(), contextlib.ExitStack() as stack:
        if fits:
            arguments["callbacks"] = _with_checkpoints(model, training, arguments, stack)
        if not strategy.is_chief:  # the chief logs the same warnings
            warnings.filterwarnings("ignore", category=UserWarning, module=r"(mirrored\.)?keras\b")
        return original(model, **arguments, **extra)


def _announce_call(strategy: Strategy, name: str, frame: types.FrameType) -> None:
    """Announces a call. A difference between its lines is a warning: one tower's may be paired with a later one.

    Args:
        frame: the caller's.
    """
    line = f"{pathlib.Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    lines = announce(strategy.communicator, f"the beginning of model.{name}", line)
    if strategy.is_chief and (others := [tower for tower, other in enumerate(lines) if other != line]):
        log.warning(
            "model.%s was called in %s on tower 0, but in %s on tower %d. If a tower makes one of these calls alone "
            "(under `if strategy.is_chief:`), the results are wrong: every tower must make the same calls",
            name,
            line,
            lines[others[0]],
            others[0],
        )


def _with_checkpoints(model: Any, training: Training, arguments: dict[str, Any], stack: contextlib.ExitStack) -> Any:
    """Returns the callbacks of ``fit``. Those that save checkpoints are last, because they save the others' state.

    Raises:
        ValueError: the data cannot be resumed from a checkpoint.
    """
    callbacks = keras.tree.flatten(arguments["callbacks"] or [])
    for callback in callbacks:
        if isinstance(callback, Monitor):
            callback.training = training
    saving = [callback for callback in callbacks if isinstance(callback, Checkpoints)]
    if not saving:
        return arguments["callbacks"]
    if isinstance(arguments["x"], types.GeneratorType):
        raise ValueError(
            "mirrored.keras.Checkpoints cannot resume in the middle of a Python generator, which cannot "
            "restart: give model.fit a keras.utils.PyDataset, arrays, or the result of "
            "strategy.distribute_dataset"
        )
    others = [callback for callback in callbacks if callback not in saving]
    agreement = [callback for callback in others if isinstance(callback, tower_callbacks.Agreement)]
    own = [callback for callback in others if callback not in agreement]
    for callback in saving:
        callback.begin(model, training, arguments["x"], own, stack)
    return [*own, *saving, *agreement]


def _reads_every(arguments: dict[str, Any]) -> int:
    """Returns the number of batches between reads of the logs by callbacks or the progress bar; 0 for no reads."""
    if tower_callbacks.read_batches(arguments["callbacks"]):
        return 1
    if arguments["verbose"] not in (1, "auto") or isinstance(arguments["callbacks"], CallbackList):
        return 0
    count = arguments.get("steps_per_epoch") or arguments.get("steps")
    if count is None:
        first = keras.tree.flatten(arguments["x"])[0]
        try:
            count = len(first)
        except TypeError:  # a loader of an IterableDataset, for example
            count = 0
        if hasattr(first, "shape"):
            count //= arguments.get("batch_size") or 32
    return max(1, count // _UPDATES_OF_THE_BAR)


@around(TorchTrainer, "train_on_batch", "test_on_batch")
def _on_batch(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Returns the logs of the global batch."""
    name = original.__name__
    training = _checked_training_of(model, name) if name == "train_on_batch" else _training_of(model)
    if training is None or not training.defers:
        return original(model, *args, **kwargs)
    training.waits = True
    try:
        with training.loop(reads_every=1):
            return original(model, *args, **kwargs)
    finally:
        training.waits = False


@around(TorchTrainer, "make_train_function", "make_test_function", "make_predict_function")
def _make_function(original: Any, model: Any, force: bool = False) -> None:
    """Makes Keras' function for a step run on this tower's share."""
    original(model, force)
    training = _training_of(model)
    attribute = original.__name__.removeprefix("make_")
    function = getattr(model, attribute)
    if training is not None and getattr(function, "func", None) is not _run:
        setattr(model, attribute, functools.partial(_run, training, attribute.removesuffix("_function"), function))


def _as_training_step(training: Training, function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Turns a run of one tower into a training step: the steps of Keras' optimizers are not torch's."""

    @functools.wraps(function)
    def train(batches: Any) -> Any:
        training.strategy.health.train()
        return function(batches)

    return train


def _run(training: Training, kind: str, function: Callable[[Any], Any], batches: Any) -> Any:
    """Runs ``function``, Keras' own for one batch, under the model's strategy, and returns its result."""
    if kind == "train" and training.defers:
        return training.step(function, batches[0], trains=True)
    if not training.several:
        function = _as_training_step(training, function) if kind == "train" else function
        return training.strategy.run(function, args=(batches,))
    if kind != "predict":
        return training.step(function, batches[0], trains=False)
    outputs, step = training.run(function, batches[0], trains=False)
    if not step.share.local:
        outputs = keras.tree.map_structure(lambda output: output[:0], outputs)
    return training.strategy.gather(outputs)
