"""Losses that Keras computes on a tower's share, adjusted so that their mean over examples is that of the global batch.

See [Note: examples are weighted] in :mod:`mirrored.keras`. Three of Keras' reductions are not a mean over examples:
``"sum"``; ``"mean_with_sample_weight"``, which divides by the sum of the weights; and means over the entries that a
mask keeps. For the last two, the towers add up the divisor, in one small collective per such loss in a step.
Regularisers of activities are sums in Keras 3.13, and means in later versions.

[Note: a loss is a mean over examples] A loss that compares the examples of a batch with each other, a sum, and a
quotient of sums over the batch have other values on several towers. Keras' own one, ``Circle``, is refused. A script's
own loss or ``compute_loss`` is probed in its first step with more than one example: on this tower's share, its mean
must be the mean over the two halves. A loss that calls the strategy is not probed, since it may compute over all
towers. The losses that layers add are probed in the same way, but with a warning: penalties that depend on the whole
batch are common there.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any, cast

import keras
import torch

from mirrored.context import current_frame, frame
from mirrored.interceptor import interceptor
from mirrored.keras.keras_private import SUMS_ACTIVITIES, is_of_activities, is_of_keras
from mirrored.keras.keras_private import loss as keras_losses
from mirrored.keras.patching import around
from mirrored.keras.steps import current
from towers.system.log import get_logger

log = get_logger("mirrored")

_OVER_ENTRIES = ("sum_over_batch_size", "mean")


@around(keras_losses, "reduce_values")
def _reduce_values(
    original: Any, values: Any, sample_weight: Any = None, reduction: Any = "sum_over_batch_size"
) -> Any:
    step = current()
    if step is None or not values.shape:
        return original(values, sample_weight, reduction)
    if reduction == "sum":
        if isinstance(getattr(current_frame(), "strategy", None), _Elsewhere):
            raise RuntimeError("a sum is right, but its halves are not compared")
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
    if found := _on_halves(lambda *part: float(keras.ops.mean(loss.call(*part))), pair):
        raise _no_mean(getattr(getattr(loss, "fn", None), "__name__", type(loss).__name__), found)


def _no_mean(name: str, found: tuple[int, float, float]) -> TypeError:
    count, whole, combined = found
    return TypeError(
        f"the loss {name!r} would be wrong on several towers: for {count} examples it is {whole:.6g}, but the mean "
        f"over its two halves is {combined:.6g}. It must return one value for each example (or token), of which Keras "
        "takes the mean. Give weights and masks as sample_weight, not in the function. If it needs all examples of a "
        "batch, gather them in it (mirrored.get_replica_context().all_gather(y_pred))"
    )


def warn_of_added_losses(model: Any, x: Any) -> None:
    """Logs a warning if the losses that layers add (``add_loss``) are not a mean over the examples ``x`` of a share.

    The model is computed in inference mode, so that its normalisation does not depend on the batch.
    """
    state = [(variable, variable.value.detach().clone()) for variable in model.variables if not variable.trainable]

    def added(*part: Any) -> float:
        model(part[0], training=False)
        return float(sum(model.losses))

    found = _on_halves(added, (x,))
    for variable, value in state:
        variable.value.detach().copy_(value)
    if found is not None:
        count, whole, combined = found
        log.warning(
            "the losses that layers of %r add with add_loss are wrong on several towers: for %d examples they are "
            "%.6g, but the mean over two halves is %.6g. Add a mean over examples (keras.ops.mean), not a sum",
            model.name,
            count,
            whole,
            combined,
        )


def check_compute_loss(model: Any) -> None:
    """Makes the next call of a script's own ``compute_loss`` raise a TypeError if it is not a mean over examples."""
    own = model.compute_loss
    variables = [variable for metric in model.metrics for variable in metric.variables]

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        del model.compute_loss
        state = [variable.value.detach().clone() for variable in variables]
        found = _on_halves(lambda some, named: float(own(*some, **named)), (args, kwargs))
        for variable, value in zip(variables, state, strict=True):
            variable.value.detach().copy_(value)
        if found is not None:
            raise _no_mean(f"{model.__class__.__name__}.compute_loss", found)
        return own(*args, **kwargs)

    model.compute_loss = compute_loss


def _on_halves(value: Callable[..., float], examples: tuple[Any, ...]) -> tuple[int, float, float] | None:
    """Compares a value of some examples with the mean of those of their halves.

    Returns:
        The number of examples, the value, and the mean. None if they are equal, or cannot be compared: the value is
        random, uses the strategy, or cannot be computed for another number of examples.
    """
    sizes = {leaf.shape[0] for leaf in keras.tree.flatten(examples) if getattr(leaf, "shape", ())}
    if len(sizes) != 1 or (count := sizes.pop()) < 2:
        return None
    half, elsewhere = count // 2, cast(Any, _Elsewhere())

    def of_rows(start: int, end: int) -> float:
        some = lambda leaf: leaf[start:end] if getattr(leaf, "shape", ()) else leaf  # noqa: E731
        return value(*keras.tree.map_structure(some, examples))

    try:
        with torch.no_grad(), frame(elsewhere, elsewhere), torch.random.fork_rng(devices=[]):
            whole, again, first, second = (
                of_rows(start, end) for start, end in ((0, count), (0, count), (0, half), (half, count))
            )
    except Exception:  # of the script
        return None
    combined = (half * first + (count - half) * second) / count
    if whole != again or abs(combined - whole) <= _TOLERANCE * max(map(abs, (whole, first, second))):
        return None
    return count, whole, combined


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
