"""Losses that Keras computes on a tower's share, adjusted so that their mean over examples is that of the global batch.

See [Note: examples are weighted] in :mod:`mirrored.keras`. Three of Keras' reductions are not a mean over examples:
``"sum"``; ``"mean_with_sample_weight"``, which divides by the sum of the weights; and means over the entries that a
mask keeps. For the last two, the towers add up the divisor, in one small collective per such loss in a step.
Regularisers of activities are sums in Keras 3.13, and means in later versions.

[Note: a loss is a mean over examples] A loss that compares the examples of a batch with each other, a sum, and a
quotient of sums over the batch have other values on several towers. Keras' own one, ``Circle``, is refused. A script's
own loss is probed in its first step with more than one example: on this tower's share, its mean must be the mean over
the two halves. A loss that calls the strategy is not probed, since it may compute over all towers.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, cast

import keras
import torch

from mirrored.context import frame
from mirrored.interceptor import interceptor
from mirrored.keras.keras_private import SUMS_ACTIVITIES, is_of_activities, is_of_keras
from mirrored.keras.keras_private import loss as keras_losses
from mirrored.keras.patching import around
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


_probed: weakref.WeakSet[Any] = weakref.WeakSet()
_TOLERANCE = 1e-3  # of float32 means, relative to the largest


@around(keras.losses.Loss, "__call__")
def _call(original: Any, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
    step = current()
    if step is not None and not step.alone and step.share.local > 1 and not torch.compiler.is_compiling():
        is_own = not (is_of_keras(type(loss)) and is_of_keras(getattr(loss, "fn", type(loss))))
        if is_own and loss not in _probed and not interceptor().compares:  # mirrored verify names the exact cause
            _probe(loss, y_true, y_pred)
        _probed.add(loss)
    return original(loss, y_true, y_pred, sample_weight)


class _Elsewhere:
    """The current strategy and replica of a probe: a loss that uses any strategy raises an error."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} of a strategy was used in a probe")


def _probe(loss: Any, y_true: Any, y_pred: Any) -> None:
    """Computes a loss on the halves of this tower's share; see [Note: a loss is a mean over examples].

    Raises:
        TypeError: it is not a mean over examples.
    """
    pair = keras.tree.map_structure(lambda leaf: keras.ops.convert_to_tensor(leaf, dtype=loss.dtype), (y_true, y_pred))
    sizes = {leaf.shape[0] if leaf.ndim else 0 for leaf in keras.tree.flatten(pair)}
    if len(sizes) != 1:
        return
    count = sizes.pop()
    half = count // 2

    def mean_of(start: int, end: int) -> float:
        return float(keras.ops.mean(loss.call(*keras.tree.map_structure(lambda leaf: leaf[start:end], pair))))

    elsewhere = cast(Any, _Elsewhere())
    try:
        with torch.no_grad(), frame(elsewhere, elsewhere), torch.random.fork_rng(devices=[]):
            whole, again, first, second = (
                mean_of(start, end) for start, end in ((0, count), (0, count), (0, half), (half, count))
            )
    except Exception:  # it calls the strategy, or cannot be computed with another number of examples
        return
    combined = (half * first + (count - half) * second) / count
    if whole != again or abs(combined - whole) <= _TOLERANCE * max(map(abs, (whole, first, second))):
        return  # the former: it is random, or nan
    name = getattr(getattr(loss, "fn", None), "__name__", type(loss).__name__)
    raise TypeError(
        f"the loss {name!r} would be wrong on several towers: for {count} examples it is {whole:.6g}, but the mean "
        f"over its two halves is {combined:.6g}. It must return one value for each example (or token), of which Keras "
        "takes the mean. Give weights and masks as sample_weight, not in the function. If it needs all examples of a "
        "batch, gather them in it (mirrored.get_replica_context().all_gather(y_pred))"
    )


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
