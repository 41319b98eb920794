"""Random numbers of Keras layers: each tower draws its own numbers, and the states of seed generators stay equal.

A ``keras.random.SeedGenerator`` is a variable of its layer, so it is mirrored and saved like other variables. In a
step, the tower's index is mixed into the seed that is drawn from the generator, not into the generator. So dropout
draws other numbers on each tower (on tower 0, those of a single device), and a resumed run continues with the same
numbers. ``mirrored verify``, which compares numbers between towers, leaves dropout out.
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
