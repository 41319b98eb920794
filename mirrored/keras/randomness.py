"""Random numbers of Keras layers: each tower draws its own, and the states of the seed generators stay equal.

A ``keras.random.SeedGenerator`` is a variable of its layer, so it is mirrored and saved as other variables are. In a
step the tower's index is mixed into the seed that is drawn from it, not into the generator: dropout draws differently
on each tower (on tower 0 as on a single device), and a run that is resumed goes on with the same numbers. In ``mirrored
verify``, which compares numbers of towers, dropout is left out.
"""

from __future__ import annotations

from typing import Any

import keras

from mirrored.interceptor import interceptor
from mirrored.keras.keras_private import random as random_ops
from mirrored.keras.patching import around
from mirrored.keras.steps import current
from mirrored.seeds import mix


@around(random_ops, "draw_seed")
def _draw_seed(original: Any, seed: Any) -> Any:
    drawn = original(seed)
    step = current()
    if step is not None:
        interceptor().drew("keras.random")
    if step is None or not step.strategy.topology.index or isinstance(seed, int):
        return drawn
    numbers = [int(number) for number in drawn]
    return keras.ops.convert_to_tensor([mix("tower", step.strategy.topology.index, *numbers) % 2**31, 0], dtype="int64")


@around(random_ops, "dropout")
def _dropout(original: Any, inputs: Any, rate: Any, *args: Any, **kwargs: Any) -> Any:
    if rate and not inputs.is_meta and interceptor().drops("Keras' dropout", inputs):
        return inputs
    return original(inputs, rate, *args, **kwargs)
