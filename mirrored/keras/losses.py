"""Losses that Keras computes on a tower's share, adjusted so that their mean over examples is that of the global batch.

See [Note: examples are weighted] in :mod:`mirrored.keras`. Three of Keras' reductions are not a mean over examples:
``"sum"``; ``"mean_with_sample_weight"``, which divides by the sum of the weights; and means over the entries that a
mask keeps. For the last two, the towers add up the divisor, in one small collective per such loss in a step.
Regularisers of activities are sums in Keras 3.13, and means in later versions. ``Circle``, which compares the examples
of a batch with each other, is refused; see :mod:`.loss_probe` for the losses of a script.
"""

from __future__ import annotations

import sys
from typing import Any

import keras

from mirrored.keras.keras_private import SUMS_ACTIVITIES, around, is_of_activities
from mirrored.keras.keras_private import loss as keras_losses
from mirrored.keras.steps import current

_OVER_ENTRIES = ("sum_over_batch_size", "mean")


@around(keras_losses, "reduce_values")
def _reduce_values(
    original: Any, values: Any, sample_weight: Any = None, reduction: Any = "sum_over_batch_size"
) -> Any:
    step = current()
    if step is None or not values.shape:
        return original(values, sample_weight, reduction)
    if reduction == "sum":
        return original(values, sample_weight, reduction) / (step.fraction or 1.0)
    if reduction == "mean_with_sample_weight" and sample_weight is not None:
        total = keras.ops.sum(values)
        divisor = step.as_mean(step.all_sum(keras.ops.cast(keras.ops.sum(sample_weight), total.dtype)))
        return keras.ops.divide_no_nan(total, divisor)
    return original(values, sample_weight, reduction)


@around(keras_losses, "apply_mask")
def _apply_mask(original: Any, sample_weight: Any, mask: Any, dtype: Any, reduction: Any) -> Any:
    step = current()
    if step is None or mask is None or reduction not in _OVER_ENTRIES:
        return original(sample_weight, mask, dtype, reduction)
    # As in Keras, every entry that counts has the weight total / valid, with both numbers of the global batch.
    entries = keras.ops.cast(mask, dtype)
    valid = step.as_mean(step.all_sum(keras.ops.sum(entries)))
    weight = entries * keras.ops.divide_no_nan(keras.ops.cast(float(entries.numel()), dtype), valid)
    if sample_weight is None:
        return weight
    sample_weight = keras.ops.cast(sample_weight, dtype)
    weight, sample_weight = keras_losses.squeeze_or_expand_to_same_rank(weight, sample_weight)
    return sample_weight * weight


@around(keras.losses.Circle, "call")
def _circle(original: Any, loss: Any, *args: Any, **kwargs: Any) -> Any:
    if current() is not None:
        raise ValueError(
            "keras.losses.Circle compares all examples of a batch with each other, but each tower has only its share "
            "of them: train with one tower, or gather the embeddings of all towers in a custom loop"
        )
    return original(loss, *args, **kwargs)


if SUMS_ACTIVITIES:

    @around(keras.Layer, "add_loss")
    def _add_loss(original: Any, layer: Any, loss: Any) -> None:
        step = current()
        if step is not None and is_of_activities(sys._getframe(2)):
            loss = loss / (step.fraction or 1.0)
        original(layer, loss)
