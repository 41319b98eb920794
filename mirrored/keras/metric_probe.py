"""A probe of custom metrics, which tests whether the towers' states can be combined.

The ``aggregation`` of a metric's variables defines how they are combined. It is usually Keras' default, ``"sum"``. A
maximum, a last value and a quotient per batch do not add up. So the first update of a metric in a step is also run on
each half of this tower's examples. The states of the halves are combined as those of two towers. Afterwards, the
metric's own state is restored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import torch
from torch import Tensor

from mirrored.keras.keras_private import function_of, is_of_keras
from mirrored.keras.patching import around
from mirrored.keras.steps import Step, current, running
from mirrored.strategy.base import Strategy
from towers.system.torch_private import disable_dynamo

_TOLERANCE = 1e-3  # of float32 sums, relative to the largest number


def probe_first_update(metric: Any) -> None:
    """Makes the first update of ``metric`` in a step test whether states of several towers can be combined.

    Metrics of Keras are not tested. Variables of ``"only_first_replica"`` are compared when they are combined: see
    [Note: tower 0's value is that of all] in :mod:`mirrored.keras.metrics`. There is no test if the arguments of
    ``update_state`` have different lengths, or if it raises an exception on halves.
    """
    aggregations = {variable.aggregation for variable in metric.variables}
    if (is_of_keras(type(metric)) and is_of_keras(function_of(metric))) or aggregations <= {"only_first_replica"}:
        return
    update = metric.update_state

    @disable_dynamo
    def update_state(*args: Any, **kwargs: Any) -> Any:
        before = _state(metric)
        result = update(*args, **kwargs)
        step = current()
        if step is not None and step.share.local and not _close(before, _state(metric), 0.0):
            del metric.update_state
            _probe(metric, before, (args, kwargs), step)
        return result

    metric.update_state = update_state


def _probe(metric: Any, before: Sequence[Tensor], arguments: Any, step: Step) -> None:
    """Updates a metric with the halves of the arguments of an update, and compares the combined states.

    For a variable of ``"only_first_replica"``, the value of all examples is used, as if the examples were gathered.

    Raises:
        TypeError: the combined state of the halves differs from the state of all examples.
    """
    after = _state(metric)
    sizes = {len(leaf) for leaf in keras.tree.flatten(arguments) if getattr(leaf, "shape", ())}
    if len(sizes) != 1 or len(before) != len(after):
        return
    half = max(1, sizes.pop() // 2)

    def updated(start: int, end: int) -> list[Tensor]:
        _set(metric, before)
        args, kwargs = keras.tree.map_structure(lambda leaf: _rows(leaf, start, end), arguments)
        metric.update_state(*args, **kwargs)
        return _state(metric)

    with torch.no_grad(), running(dataclasses.replace(step, alone=True)):
        try:
            first, second, whole = updated(0, half), updated(half, 2 * half), updated(0, 2 * half)
            expected = _numbers(metric.result())
        except Exception:  # it cannot be updated with another number of examples
            _set(metric, after)
            return
        states = zip(metric.variables, before, first, second, whole, strict=True)
        combined = [_combined(variable.aggregation, *values) for variable, *values in states]
        _set(metric, combined)
        result = _numbers(metric.result())
        _set(metric, after)
    if _close(combined, whole, _TOLERANCE) or _close(result, expected, _TOLERANCE):
        return
    raise TypeError(
        f"the metric {metric.name!r} ({type(metric).__name__}) would be wrong on several towers: for {2 * half} "
        f"examples it returns {_text(expected)}, but {_text(result)} if two towers have half of them each and "
        "their variables are combined by their aggregation. Sums and numbers of examples add up "
        "(aggregation='sum', the default), 'mean' is for means over examples, and a function must return one "
        "value for each example. For anything else, such as a maximum, let update_state gather the examples of "
        "all towers (y_pred = strategy.gather(y_pred)), and create the variables with self.add_variable(..., "
        "aggregation='only_first_replica')"
    )


def _combined(aggregation: str, before: Tensor, first: Tensor, second: Tensor, whole: Tensor) -> Tensor:
    if aggregation == "only_first_replica":
        return whole
    return first + second - before if aggregation == "sum" else (first + second) / 2


def _rows(leaf: Any, start: int, end: int) -> Any:
    """Returns some rows of an array, or copies of its only row."""
    if not getattr(leaf, "shape", ()):
        return leaf
    return leaf[start:end] if len(leaf) > 1 else torch.cat([torch.as_tensor(leaf)] * (end - start))


def _state(metric: Any) -> list[Tensor]:
    return [variable.value.detach().clone() for variable in metric.variables]


def _set(metric: Any, state: Sequence[Tensor]) -> None:
    for variable, value in zip(metric.variables, state, strict=True):
        variable.value.detach().copy_(value)


def _numbers(result: Any) -> list[Tensor]:
    return [keras.ops.convert_to_tensor(value).detach().clone() for value in keras.tree.flatten(result)]


def _close(state: Sequence[Tensor], other: Sequence[Tensor], tolerance: float) -> bool:
    """Returns whether tensors are equal within a fraction of the largest number in each."""
    return len(state) == len(other) and all(
        torch.allclose(a.double(), b.double(), 0.0, tolerance * float(b.double().abs().max()), equal_nan=True)
        for a, b in zip(state, other, strict=True)
        if b.numel()
    )


def _text(numbers: Sequence[Tensor]) -> str:
    return ", ".join(f"{float(value):.6g}" for value in numbers if value.numel() == 1) or "other numbers"


@around(Strategy, "gather")
def _gather(original: Any, strategy: Strategy, value: Any, axis: int = 0) -> Any:
    """Gathers without stand-ins. It returns ``value`` if Keras only traces shapes, or during a probe."""
    step = current()
    if (step is not None and step.alone) or (isinstance(value, Tensor) and value.is_meta):
        return value
    if step is not None and not step.share.local and axis == 0:
        value = keras.tree.map_structure(lambda leaf: leaf[:0] if getattr(leaf, "shape", ()) else leaf, value)
    return original(strategy, value, axis)
