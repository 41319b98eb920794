"""All private names of Keras that this project uses, and how functions of Keras are replaced.

The names exist in Keras 3.13 to 3.15. ``tests/keras/test_patches.py`` checks that they exist in the installed Keras.
All names that other modules replace belong to a module or class that is imported here.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.backend.torch import random as random
from keras.src.backend.torch.core import get_device as get_device
from keras.src.backend.torch.trainer import TorchEpochIterator as TorchEpochIterator
from keras.src.backend.torch.trainer import TorchTrainer as TorchTrainer
from keras.src.callbacks.callback_list import CallbackList as CallbackList
from keras.src.losses import loss as loss
from keras.src.metrics import reduction_metrics as reduction_metrics
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.trainers import data_adapters as data_adapters
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter as ArrayDataAdapter
from keras.src.trainers.data_adapters.data_adapter import DataAdapter as DataAdapter
from keras.src.trainers.trainer import Trainer as Trainer
from keras.src.utils import tracking

SUMS_ACTIVITIES = tuple(map(int, keras.__version__.split(".")[:2])) < (3, 14)
"""Whether a regulariser of activities adds up the examples."""


def is_of_activities(caller: types.FrameType) -> bool:
    """Returns whether ``caller`` calls a layer's ``add_loss`` for the regulariser of its activities."""
    return caller.f_code.co_name == "__call__" and caller.f_globals.get("__name__") == keras.Layer.__module__


def function_of(metric: Any) -> Any:
    """Returns the function whose values a metric averages, or the metric's type if it computes the values itself."""
    return getattr(metric, "_fn", type(metric))


def is_of_keras(function: Any) -> bool:
    """Returns whether a function or class belongs to Keras."""
    return str(getattr(function, "__module__", "")).partition(".")[0] == "keras"


def metrics_of_default_steps(model: Any) -> list[Any]:
    """Returns the metrics that Keras' own steps update, also if the model's property ``metrics`` omits them."""
    return [metric for metric in (model._loss_tracker, model._compile_metrics) if metric is not None]


def variables_of_trained_layers(model: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the layers of a model that are not frozen, each with the variables that it changes without a gradient.

    ``model.non_trainable_variables`` would also contain the weights of frozen layers.
    """
    for layer in model._flatten_layers():
        if layer.trainable:
            for variable in layer._non_trainable_variables:
                if isinstance(variable, keras.Variable):
                    yield layer, variable


def first_epoch(model: Any) -> int | None:
    """Returns the epoch at which ``fit`` starts if ``BackupAndRestore`` has restored one, or None."""
    epoch: int | None = model._initial_epoch
    return epoch


def set_first_epoch(model: Any, epoch: int | None) -> None:
    """Makes ``fit`` start at an epoch; None for its ``initial_epoch``."""
    model._initial_epoch = epoch


def write_nothing(callback: Any) -> None:
    """Makes a ``BackupAndRestore`` only restore, or a ``ModelCheckpoint`` only decide.

    They still call ``save_weights``, which writes nothing on these towers, because all towers must call it.
    """
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        callback._save_model = lambda: callback.model.save_weights("")
        callback.on_train_end = lambda logs=None: None
        return

    def decide(epoch: int, batch: int | None, logs: Any) -> None:
        path = callback._get_file_path(epoch, batch, logs)
        if callback._should_save_model(epoch, batch, logs, path):
            callback.model.save_weights(path)

    callback._save_model = decide


def variables_of_optimizer(optimizer: Any) -> list[Any]:
    """Returns the variables of the model that an optimizer was built with."""
    return list(optimizer._trainable_variables)


def used_gradients(optimizer: Any, gradients: list[Any], variables: list[Any]) -> tuple[list[Any], list[Any]]:
    """Returns the gradients that are not None, with their variables, as ``optimizer.apply`` finds them.

    Raises:
        ValueError: there is none, or the optimizer was built with other variables.
        NotImplementedError: a variable's gradient replaces it (float8).
    """
    if not optimizer.built:
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(variables)
    optimizer._check_variables_are_known(variables)
    if any(optimizer._overwrite_variable_with_gradient(variable) for variable in variables):
        raise NotImplementedError("sharded steps of Keras optimizers do not support float8 variables")
    gradients, variables = optimizer._filter_empty_gradients(gradients, variables)
    return gradients, variables


def copy_of_optimizer(optimizer: Any) -> Any:
    """Returns an optimizer of the same class and settings, without variables of a model."""
    config = optimizer.get_config()
    if not isinstance(optimizer._learning_rate, keras.Variable):
        config["learning_rate"] = 0.0
    copy = type(optimizer).from_config(config)
    if not isinstance(optimizer._learning_rate, keras.Variable):
        vars(copy)["_learning_rate"] = optimizer._learning_rate
    return copy


def built(model: Any) -> Any:
    """Returns a model's optimizer with its variables."""
    optimizer = model.optimizer
    if not optimizer.built:
        with keras.name_scope(optimizer.name, caller=optimizer):
            optimizer.build(model.trainable_variables)
    return optimizer


def numbers_of(optimizer: Any) -> dict[str, Any]:
    """Returns the variables that belong to no parameter, by name, except the learning rate."""
    found = {name: value for name, value in vars(optimizer).items() if isinstance(value, keras.Variable)}
    found.pop("_learning_rate", None)
    return found


def settings_of(optimizer: Any) -> dict[str, Any]:
    """Returns the settings of an optimizer that a script may change between two steps."""
    found = {name: value for name, value in vars(optimizer).items() if isinstance(value, (int, float, type(None)))}
    if isinstance(optimizer._learning_rate, keras.Variable):
        found["_learning_rate"] = float(optimizer._learning_rate.value)
    return {name: value for name, value in found.items() if name not in ("built", "_lock")}


def set_settings(optimizer: Any, settings: dict[str, Any]) -> None:
    """Gives an optimizer the result of :func:`settings_of` of another one of its class."""
    for name, value in settings.items():
        if isinstance(own := vars(optimizer).get(name), keras.Variable):
            own.assign(value)
        else:
            vars(optimizer)[name] = value


def clipped(optimizer: Any, gradients: list[Any]) -> list[Any]:
    """Returns gradients as an optimizer would use them, without the scale of the loss."""
    if (scale := optimizer.loss_scale_factor) is not None:
        gradients = [gradient / scale for gradient in gradients]
    return list(optimizer._clip_gradients(gradients))


def step(optimizer: Any, gradients: list[Any], variables: list[Any]) -> None:
    """Applies gradients that are already scaled."""
    optimizer._backend_apply_gradients(gradients, variables)
    finish_step(optimizer, variables)


def attach(obj: Any, name: str, value: Any) -> None:
    """Gives a model or an optimizer an additional attribute.

    If the value refers to the object, both can be collected, unlike those of a dict with weak keys.
    """
    vars(obj)[f"_mirrored_{name}"] = value


def attached(obj: Any, name: str) -> Any:
    """Returns an additional attribute, or None."""
    return vars(obj).get(f"_mirrored_{name}")


_OF_COMPILE = ("optimizer", "loss", "compiled", "_compile_loss", "_compile_metrics", "_loss_tracker")
_FUNCTIONS = ("train_function", "test_function", "predict_function")
_NOT_PICKLED = {*_OF_COMPILE, *_FUNCTIONS, "_compile_config", "_eval_epoch_iterator", "history"}
_NOT_PICKLED |= {"_mirrored_strategy", "_mirrored_training"}


def compiled(model: Any) -> dict[str, Any]:
    """Returns the attributes that a training step needs and ``compile`` has set."""
    return {name: vars(model)[name] for name in _OF_COMPILE if name in vars(model)}


def register_variables(layer: Any) -> None:
    """Makes a layer's variables torch parameters of it. Keras does it at the first use of them."""
    layer.torch_params  # noqa: B018


def written_by(layer: Any) -> list[Any]:
    """Returns the variables of a layer that no optimizer steps, such as moving statistics and states of seeds."""
    of_seeds = [generator.state for generator in layer._seed_generators]
    return [each for each in (*layer._non_trainable_variables, *of_seeds) if isinstance(each, keras.Variable)]


def reduce_with_attributes(obj: Any) -> Any:
    """Returns how to pickle an object of Keras with all its attributes, or NotImplemented for other objects."""
    kind = type(obj)
    for plain in (list, dict, set):
        if isinstance(obj, plain) and kind.__module__ == tracking.__name__:
            return plain.__new__, (kind,), (plain(obj), vars(obj)), None, None, _fill
    if not isinstance(obj, KerasSaveable):
        return NotImplemented
    state = dict(vars(obj))
    if isinstance(obj, Trainer):
        state.update((name, None) for name in _NOT_PICKLED if name in state)
    return object.__new__, (kind,), state, None, None, _update


def _update(obj: Any, state: Any) -> None:
    vars(obj).update(state)


def _fill(tracked: Any, state: Any) -> None:
    contents, attributes = state
    vars(tracked).update(attributes)
    plain = type(contents)
    (plain.extend if plain is list else plain.update)(tracked, contents)


def set_memory(variable: Any, tensor: Any) -> None:
    """Gives a Keras variable other memory."""
    variable._value = tensor


def replace_clipping(optimizer: Any, clip: Callable[..., list[Any]]) -> None:
    """Makes an optimizer clip by norms with ``clip(gradients, variables, each, all)``.

    One of ``each`` and ``all`` is the largest norm, of one gradient or of all.
    """
    original, apply = optimizer._clip_gradients, optimizer._backend_apply_gradients
    variables: list[Any] = []

    def clipped(gradients: list[Any]) -> Any:
        each, all = optimizer.clipnorm or 0, optimizer.global_clipnorm or 0
        if each > 0 or all > 0:
            return clip(gradients, variables, each if each > 0 else None, all if all > 0 and each <= 0 else None)
        return original(gradients)

    def noting(gradients: Any, trainable_variables: Any) -> None:
        variables[:] = trainable_variables
        apply(gradients, trainable_variables)

    vars(optimizer).update(_clip_gradients=clipped, _backend_apply_gradients=noting)


def decays(optimizer: Any, variable: Any) -> bool:
    """Returns whether an optimizer applies weight decay to a variable."""
    return bool(optimizer._use_weight_decay(variable))


def replace_weight_decay(optimizer: Any, decays: Callable[[Any], bool]) -> None:
    """Makes an optimizer apply weight decay to the variables for which ``decays(variable)``."""
    vars(optimizer)["_use_weight_decay"] = decays


def apply_like(optimizer: Any, other: Any, gradients: list[Any], variables: list[Any]) -> None:
    """Lets ``other`` step with the present settings and numbers of ``optimizer``, without constraints."""
    for name, value in vars(optimizer).items():
        if name in vars(other) and isinstance(value, (bool, int, float, str, type(None))):
            vars(other)[name] = value
    numbers = {name: value for name, value in vars(optimizer).items() if isinstance(value, keras.Variable)}
    for name, value in numbers.items():
        vars(other)[name].assign(value)
    if optimizer.loss_scale_factor is not None:
        gradients = [gradient / optimizer.loss_scale_factor for gradient in gradients]
    other._backend_apply_gradients(gradients, variables)
    for name, value in numbers.items():
        value.assign(vars(other)[name])


def finish_step(optimizer: Any, variables: list[Any]) -> None:
    """Does what ``optimizer.apply`` does after its step: constraints, and the number of steps."""
    for variable in variables:
        if variable.constraint is not None:
            variable.assign(variable.constraint(variable))
    optimizer._iterations.assign_add(1)


Replacement = Callable[..., Any]


def around(owner: Any, *names: str) -> Callable[[Replacement], Replacement]:
    """Returns a decorator that replaces functions of ``owner``. The original is the first argument of the replacement.

    Args:
        owner: a module or a class.
        names: the names of the functions.

    Raises:
        AttributeError: a name does not exist.
    """

    def replace(function: Replacement) -> Replacement:
        for name in names:
            setattr(owner, name, _replaced(getattr(owner, name), function))
        return function

    return replace


def _replaced(original: Callable[..., Any], function: Replacement) -> Callable[..., Any]:
    @functools.wraps(original)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return function(original, *args, **kwargs)

    # Keras reads the parameters without following wrappers.
    replaced.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return replaced
