"""Lets Keras make its tensors on the tower's device.

Keras has one default device for the process: a GPU where there is one. That is the tower's where the kinds are the
same, as a strategy makes its device the current one. Elsewhere (CPU towers on a machine with GPUs, a device that Keras
has not heard of) it is told, in the strategy's scope and in ``fit`` and its kind.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from mirrored.keras.keras_private import current_device
from mirrored.keras.patching import around
from mirrored.strategy.base import Strategy


def on_device_of(strategy: Strategy) -> contextlib.AbstractContextManager[Any]:
    """Inside, Keras makes its tensors on a strategy's device."""
    if str(current_device()).partition(":")[0] == strategy.device.type:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = keras.device(str(strategy.device))
    return context


@around(Strategy, "scope")
@contextlib.contextmanager
def _scope(original: Any, strategy: Strategy, **settings: Any) -> Iterator[Strategy]:
    with original(strategy, **settings), on_device_of(strategy):
        yield strategy
