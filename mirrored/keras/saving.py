"""Files of Keras models: the chief writes them, all towers read them.

``model.save``, ``save_weights`` and ``export`` of a model of a strategy write on the chief and do nothing on the other
towers, so a script may call them as it did on one device, in callbacks too. ``model.load_weights``, and ``load_model``
in a scope, wait until all towers have come, so that what the chief was told to write before is there.
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
_strategies: weakref.WeakKeyDictionary[Any, Strategy] = weakref.WeakKeyDictionary()  # which they keep alive


def note_strategy(model: Any) -> None:
    """A model is made here: it belongs to the strategy whose scope this is, if there is one."""
    frame = current_frame()
    if frame is not None and isinstance(frame.strategy, Strategy):
        _strategies[model] = frame.strategy


def strategy_of(model: Any) -> Strategy | None:
    """The strategy in whose scope a model was made, or that mirrors it."""
    if (made_in := _strategies.get(model)) is not None:
        return made_in
    strategy = strategy_with_towers()
    if not isinstance(strategy, Strategy) or not model.built:
        return None
    variables = model.trainable_variables
    return strategy if variables and all(strategy.engine.recorder.knows(v.value) for v in variables) else None


@around(keras.Model, "save", "save_weights", "export")
def _write(original: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Let the chief alone write a file."""
    strategy = strategy_of(model)
    if strategy is None or strategy.is_chief:
        return original(model, *args, **kwargs)
    return None


@around(keras.models, "load_model")
@around(keras.saving, "load_model")
def _load_model(original: Any, *args: Any, **kwargs: Any) -> Any:
    """Wait, in a scope, until the chief has written what it was told to before."""
    frame = current_frame()
    if frame is not None and frame.replica is None and frame.strategy.num_replicas_in_sync > 1:
        announce(frame.strategy.communicator, "keras.models.load_model()")
    return original(*args, **kwargs)


@contextlib.contextmanager
def read_in_turn(strategy: Strategy, call: str) -> Iterator[None]:
    """The chief does first what stands inside, the others when it is done; ``load_weights`` waits for nobody there.

    Raises:
        TypeError, ValueError: the chief failed; on all towers.
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
