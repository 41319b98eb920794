"""Files of Keras models: the chief writes them, and all towers read them.

``model.save``, ``save_weights`` and ``export`` of a strategy's model write on the chief and do nothing on other towers.
So a script calls them as on one device, also in callbacks. ``model.load_weights``, and ``load_model`` in a scope, wait
until all towers have called them, so that the chief has finished its earlier writes.
"""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Iterator
from typing import Any

import keras

from mirrored.context import current_frame, strategy_with_towers
from mirrored.keras.patching import around
from mirrored.strategy.base import Strategy
from towers.collectives.agreement import announce

_waits = contextvars.ContextVar("whether the readers of weights wait for all towers", default=True)
_strategies: weakref.WeakKeyDictionary[Any, Strategy] = weakref.WeakKeyDictionary()  # kept alive by models


def note_strategy(model: Any) -> None:
    """Assigns a new model to the strategy of the current scope, if there is one."""
    frame = current_frame()
    if frame is not None and isinstance(frame.strategy, Strategy):
        _strategies[model] = frame.strategy


def strategy_of(model: Any) -> Strategy | None:
    """Returns the strategy in whose scope a model was created, or that mirrors it."""
    if (made_in := _strategies.get(model)) is not None:
        return made_in
    strategy = strategy_with_towers()
    if not isinstance(strategy, Strategy) or not model.built:
        return None
    variables = model.trainable_variables
    return strategy if variables and all(strategy.engine.recorder.knows(v.value) for v in variables) else None


@around(keras.Model, "save", "save_weights", "export")
def _write(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Writes a file on the chief only."""
    strategy = strategy_of(model)
    if strategy is None or strategy.is_chief:
        return original(model, *args, **kwargs)
    return None


@around(keras.models, "load_model")
@around(keras.saving, "load_model")
def _load_model(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Waits, in a scope, until the chief has finished its earlier writes."""
    frame = current_frame()
    if frame is not None and frame.replica is None and frame.strategy.num_replicas_in_sync > 1:
        announce(frame.strategy.communicator, "keras.models.load_model()")
    return original(*args, **kwargs)


@contextlib.contextmanager
def read_in_turn(strategy: Strategy, call: str) -> Iterator[None]:
    """Runs the block on the chief first, then on the other towers. ``load_weights`` does not wait inside.

    Raises:
        TypeError, ValueError: on all towers: the chief failed.
    """
    token = _waits.set(False)
    try:
        if not strategy.is_chief:
            announce(strategy.communicator, call)
        try:
            yield
        except Exception as error:
            if strategy.is_chief:
                announce(strategy.communicator, call, error=error)
            raise
        if strategy.is_chief:
            announce(strategy.communicator, call)
    finally:
        _waits.reset(token)


@around(keras.Model, "load_weights")
def _load_weights(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    strategy = strategy_of(model)
    if strategy is not None and strategy.num_replicas_in_sync > 1 and _waits.get():
        announce(strategy.communicator, "model.load_weights()")
    return original(model, *args, **kwargs)
