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
from keras.src.trainers import data_adapters as data_adapters
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter as ArrayDataAdapter
from keras.src.trainers.data_adapters.data_adapter import DataAdapter as DataAdapter
from keras.src.trainers.trainer import Trainer as Trainer

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
    """Makes a ``BackupAndRestore`` only restore, or a ``ModelCheckpoint`` only decide."""
    if isinstance(callback, keras.callbacks.BackupAndRestore):
        callback._save_model = lambda: None
        callback.on_train_end = lambda logs=None: None
    else:
        callback._save_model = lambda epoch, batch, logs: callback._should_save_model(
            epoch, batch, logs, callback._get_file_path(epoch, batch, logs)
        )


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
