"""Probes of a script's own losses and metrics, which test what ``fit`` may assume of them.

[Note: probes of losses] They test that a loss is a mean over examples. A sum, a quotient of sums over the batch, and a
loss that compares the examples of a batch have other values on several towers. So in the first training step with more
than one example, each loss of the script is also computed on each half of this tower's share. The mean over the halves
must be the loss of the share. A loss that uses the strategy is not tested, because it may compute over all towers.

A ``train_step`` of the script has side effects, so it only runs up to its first ``backward()``, and not on halves,
because normalisation depends on the batch: the loss of the same examples twice must be the loss of the examples. Random
losses (dropout) are only distinguished from sums, of which the loss is twice as large.

[Note: probes of metrics] They test whether the towers' states can be combined. The ``aggregation`` of a metric's
variables defines how. It is usually Keras' default, ``"sum"``. A maximum, a last value and a quotient per batch do not
add up. So the first update of a metric in a step is also run on each half of this tower's examples. The states of the
halves are combined as those of two towers. Afterwards, the metric's own state is restored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import keras
import torch
from torch import Tensor

from mirrored import generators
from mirrored.context import frame
from mirrored.interceptor import interceptor
from mirrored.keras.keras_private import TorchTrainer, around, function_of, is_of_keras
from mirrored.keras.steps import Step, current, running
from mirrored.strategy.base import Strategy
from towers.system.messages import get_logger
from towers.system.torch_private import disable_dynamo

log = get_logger("mirrored")

_TOLERANCE = 1e-3  # of float32 means and sums, relative to the largest number

_probed: weakref.WeakSet[Any] = weakref.WeakSet()
"""The losses of ``compile`` that have passed, or that belong to Keras."""


class _Difference(NamedTuple):
    """The number of examples, their loss, and the mean of the losses of their halves."""

    examples: int
    whole: float
    halves: float


def _can_probe(step: Step | None) -> bool:
    # mirrored verify runs a script unchanged: it names the exact cause.
    return step is not None and not step.alone and step.share.local > 1 and not interceptor().compares


@around(keras.losses.Loss, "__call__")
def _call(original: Any, loss: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
    if loss not in _probed and not torch.compiler.is_compiling() and _can_probe(current()):
        if not (is_of_keras(type(loss)) and is_of_keras(getattr(loss, "fn", type(loss)))):
            _check(loss, y_true, y_pred)
        _probed.add(loss)
    return original(loss, y_true, y_pred, sample_weight)


def _check(loss: Any, y_true: Any, y_pred: Any) -> None:
    """Raises a TypeError if a loss of ``compile`` is not a mean over examples."""
    pair = keras.tree.map_structure(lambda leaf: keras.ops.convert_to_tensor(leaf, dtype=loss.dtype), (y_true, y_pred))
    if found := _on_halves(lambda *part: float(keras.ops.mean(loss.call(*part))), pair):
        raise _error(getattr(getattr(loss, "fn", None), "__name__", type(loss).__name__), found)


@contextlib.contextmanager
def probing(model: Any, batch: Any) -> Iterator[bool]:
    """Encloses a training step, whose losses are tested if possible: in it, and before it that of ``train_step``.

    Penalties that layers add (``add_loss``) often depend on the whole batch, so they get a warning and not an error.

    Args:
        batch: the examples of this tower's share.

    Yields:
        Whether they are tested.

    Raises:
        TypeError: in the step, if the script's own ``compute_loss`` is not a mean over examples; before it, if that of
            its ``train_step`` is not.
    """
    step = current()
    if step is None or not _can_probe(step):
        yield False
        return
    if _computes_loss(model.__class__.train_step):
        _check_train_step(model, batch, step)
    own = model.compute_loss
    is_own = model.__class__.compute_loss is not keras.Model.compute_loss

    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        variables = [variable for metric in model.metrics for variable in metric.variables]
        with _keeping(variables):
            found = _on_halves(lambda some, named: float(own(*some, **named)), (args, kwargs))
        if found is not None:
            raise _error(f"{model.__class__.__name__}.compute_loss", found)
        return own(*args, **kwargs)

    if is_own:
        model.compute_loss = compute_loss
    try:
        yield True
    finally:
        if is_own:
            del model.compute_loss
    if model.losses:
        _warn_of_added_losses(model, keras.utils.unpack_x_y_sample_weight(batch)[0])


def _computes_loss(train_step: Any) -> bool:
    """Returns whether a ``train_step`` computes a loss itself, and does not leave that to the one of Keras."""
    names = getattr(getattr(train_step, "__code__", None), "co_names", ())
    return train_step is not TorchTrainer.train_step and ("train_step" not in names or "backward" in names)


class _Found(BaseException):
    """Ends a ``train_step`` at its first loss, which is the argument."""


def _check_train_step(model: Any, batch: Any, step: Step) -> None:
    """Raises a TypeError if the first loss of a model's own ``train_step`` is not a mean over examples."""

    def loss_of(times: int) -> float:
        data = keras.tree.map_structure(
            lambda leaf: torch.cat([leaf] * times) if getattr(leaf, "shape", ()) else leaf, batch
        )
        share = dataclasses.replace(step.share, local=times * step.share.local)
        try:
            with running(dataclasses.replace(step, share=share)), _stopping_at_gradients():
                model.train_step(data)
        except _Found as found:
            return cast(float, found.args[0])
        raise RuntimeError("the step computes no gradients")

    variables = [*model.non_trainable_variables, *(v for metric in model.metrics for v in metric.variables)]
    with _keeping(variables), _keeping_numbers(model), _keeping_generators(step), _without_strategy():
        try:
            once, twice = [loss_of(1)], [loss_of(2)]
            if math.isclose(once[0], twice[0], rel_tol=_TOLERANCE):
                return
            for _ in range(3):
                once.append(loss_of(1))
                twice.append(loss_of(2))
        except Exception:  # of the script
            return
    one, two = statistics.mean(once), statistics.mean(twice)
    is_random = not math.isclose(min(once), max(once), rel_tol=_TOLERANCE)
    apart = min(twice) > max(once) or max(twice) < min(once)
    if apart and not (is_random and abs(two - one) < abs(one) / 2):
        raise TypeError(
            f"the loss of {model.__class__.__name__}.train_step would be wrong on several towers: it is {one:.6g} for "
            f"{step.share.local} examples, and {two:.6g} for the same examples twice. train_step gets the examples of "
            "one tower, so the loss must be their mean: divide a sum by their number, len(x), not by the size of the "
            "global batch"
        )


@contextlib.contextmanager
def _stopping_at_gradients() -> Iterator[None]:
    """Makes autograd raise :class:`_Found` where gradients would be computed."""

    def stop(*args: Any, **kwargs: Any) -> NoReturn:
        losses = [*args, *kwargs.values()][0]
        raise _Found(float((losses if isinstance(losses, Tensor) else losses[0]).detach()))

    before = torch.autograd.backward, torch.autograd.grad
    torch.autograd.backward = torch.autograd.grad = stop  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.backward, torch.autograd.grad = before


@contextlib.contextmanager
def _keeping_numbers(model: Any) -> Iterator[None]:
    """Restores the numbers among a model's attributes after the context."""
    numbers = {name: value for name, value in vars(model).items() if isinstance(value, (int, float, complex))}
    try:
        yield
    finally:
        vars(model).update(numbers)


@contextlib.contextmanager
def _keeping_generators(step: Step) -> Iterator[None]:
    """Restores the states of all random generators after the context."""
    place = generators.take(step.strategy.device)
    try:
        yield
    finally:
        generators.put(place, step.strategy.device)


def _warn_of_added_losses(model: Any, x: Any) -> None:
    def added(*part: Any) -> float:
        model(part[0], training=False)  # otherwise, normalisation would depend on the batch
        return float(sum(model.losses))

    with _keeping([variable for variable in model.variables if not variable.trainable]):
        found = _on_halves(added, (x,))
    if found is not None:
        log.warning(
            "the losses that layers of %r add with add_loss are wrong on several towers: for %d examples they are "
            "%.6g, but the mean over two halves is %.6g. Add a mean over examples (keras.ops.mean), not a sum",
            model.name,
            *found,
        )


def _error(name: str, found: _Difference) -> TypeError:
    return TypeError(
        f"the loss {name!r} would be wrong on several towers: for {found.examples} examples it is {found.whole:.6g}, "
        f"but the mean over its two halves is {found.halves:.6g}. It must return one value for each example (or "
        "token), of which Keras takes the mean. Give weights and masks as sample_weight, not in the function. If it "
        "needs all examples of a batch, gather them in it (mirrored.get_replica_context().all_gather(y_pred))"
    )


@contextlib.contextmanager
def _keeping(variables: Sequence[Any]) -> Iterator[None]:
    """Restores the values of variables after the context."""
    values: list[Tensor] = [variable.value.detach().clone() for variable in variables]
    try:
        yield
    finally:
        for variable, value in zip(variables, values, strict=True):
            variable.value.detach().copy_(value)


class _Elsewhere:
    """The current strategy and replica in a probe, so that a loss that uses any strategy raises an error."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} of a strategy was used in a probe")


def _without_strategy() -> contextlib.AbstractContextManager[Any]:
    """Makes every use of a strategy raise an error inside the context."""
    elsewhere = cast(Any, _Elsewhere())
    return frame(elsewhere, elsewhere)


def _on_halves(loss: Callable[..., float], examples: tuple[Any, ...]) -> _Difference | None:
    """Compares the loss of some examples with the mean of the losses of their halves.

    Returns:
        None if they are equal, or cannot be compared: the loss is random, uses the strategy, or cannot be computed for
        another number of examples.
    """
    sizes = {leaf.shape[0] for leaf in keras.tree.flatten(examples) if getattr(leaf, "shape", ())}
    step = current()
    if step is None or len(sizes) != 1 or (count := sizes.pop()) < 2:
        return None
    half = count // 2

    def of_rows(start: int, end: int) -> float:
        part = keras.tree.map_structure(lambda leaf: leaf[start:end] if getattr(leaf, "shape", ()) else leaf, examples)
        # Keras' reduction "sum" is divided by the fraction of the examples.
        with running(dataclasses.replace(step, share=dataclasses.replace(step.share, local=end - start))):
            return loss(*part)

    try:
        with torch.no_grad(), _without_strategy(), _keeping_generators(step):
            whole, again = of_rows(0, count), of_rows(0, count)
            first, second = of_rows(0, half), of_rows(half, count)
    except Exception:  # of the script
        return None
    halves = (half * first + (count - half) * second) / count
    if whole != again or abs(halves - whole) <= _TOLERANCE * max(map(abs, (whole, first, second))):
        return None
    return _Difference(count, whole, halves)


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
