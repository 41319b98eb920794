"""Layers of Keras that need more than their tower's share: batch normalization, and random numbers.

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
from typing import Any

import keras
import torch
from torch import Tensor

from mirrored.context import current_frame, get_replica_context
from mirrored.interceptor import interceptor
from mirrored.keras.keras_private import around
from mirrored.keras.keras_private import random as random_ops
from mirrored.keras.steps import current
from mirrored.seeds import mix
from towers.system.torch_private import disable_dynamo

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
