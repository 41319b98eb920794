"""Computations of Keras that need more than their tower's share: losses, batch normalization, and random numbers.

[Note: losses over the global batch] See also [Note: examples are weighted] in :mod:`mirrored.keras`. Three of Keras'
reductions are not a mean over examples: ``"sum"``; ``"mean_with_sample_weight"``, which divides by the sum of the
weights; and means over the entries that a mask keeps. For the last two, the towers add up the divisor, in one small
collective per such loss in a step. A sum is divided by the share's fraction of the examples, because the step
multiplies every loss by it. Regularisers of activities are sums in Keras 3.13, and means in later versions.
``Circle``, which compares the examples of a batch with each other, is refused. :mod:`mirrored.keras.probes` examines
the losses of a script.

[Note: batch normalization over the global batch] This is for layers of ``strategy.scope(sync_batch_norm=True)``. Each
tower computes mean, variance and count of its share as Keras does. All towers gather these and combine them in tower
order, which gives the same bits on every tower. Gradients flow through the gathering to every tower.

[Note: random numbers of layers] Each tower draws its own numbers, and the states of seed generators stay equal. A
``keras.random.SeedGenerator`` is a variable of its layer, so it is mirrored and saved like other variables. In a step,
the tower's index is mixed into the seed that is drawn from the generator, not into the generator. So dropout draws
other numbers on each tower (on tower 0, those of a single device), and a resumed run continues with the same numbers.
``mirrored verify``, which compares numbers between towers, leaves dropout out.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import keras
import torch
from torch import Tensor

from mirrored.context import current_frame, get_replica_context
from mirrored.interceptor import interceptor
from mirrored.keras.keras_private import SUMS_ACTIVITIES, around, is_of_activities
from mirrored.keras.keras_private import loss as keras_losses
from mirrored.keras.keras_private import random as random_ops
from mirrored.keras.steps import current
from mirrored.seeds import mix
from towers.system.torch_private import disable_dynamo

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


_MARK = "_mirrored_takes_global_statistics"


def takes_global_statistics(layer: Any) -> bool:
    """Returns whether a layer normalises over the global batch."""
    return getattr(layer, _MARK, False)


@around(keras.layers.BatchNormalization, "__init__")
def _init(original: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
    original(layer, *args, **kwargs)
    frame = current_frame()
    if frame is not None and frame.strategy.engine.synchronises_batch_norm:
        setattr(layer, _MARK, True)


@around(keras.layers.BatchNormalization, "_moments")
def _moments(original: Any, layer: Any, inputs: Any, mask: Any) -> tuple[Tensor, Tensor]:
    moments: tuple[Tensor, Tensor] = original(layer, inputs, mask)
    step = current()
    if step is None:
        return moments
    if not takes_global_statistics(layer) and not interceptor().normalises(layer.name):
        return moments
    mean, variance = moments
    if mask is None:
        count = torch.full((), inputs.numel() / mean.numel(), dtype=mean.dtype, device=mean.device)
    else:
        others = math.prod(inputs.shape[:-1]) / math.prod(mask.shape)
        count = keras.ops.sum(keras.ops.cast(mask, mean.dtype)) * others
    if not step.share.local:
        count = torch.zeros_like(count)
    return _combined(mean, variance, count.detach())


@disable_dynamo
def _combined(mean: Tensor, variance: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    """Combines the towers' means and variances into those of the global batch."""
    replica = get_replica_context()
    assert replica is not None
    rows = replica.all_gather(torch.cat([mean.flatten(), variance.flatten(), count.reshape(1)]).unsqueeze(0))
    means, variances, counts = rows.split([mean.numel(), variance.numel(), 1], dim=1)
    fractions = counts / counts.sum()
    total = (fractions * means).sum(0)
    spread = (fractions * (variances + (means - total).square())).sum(0)
    return total.view_as(mean), spread.view_as(variance)


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
