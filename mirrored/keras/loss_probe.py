"""A probe of a script's own losses, which tests whether they are means over examples.

A sum, a quotient of sums over the batch, and a loss that compares the examples of a batch have other values on several
towers. So in the first training step with more than one example, each loss of the script is also computed on each half
of this tower's share. The mean over the halves must be the loss of the share. A loss that uses the strategy is not
tested, because it may compute over all towers.

A ``train_step`` of the script has side effects, so it only runs up to its first ``backward()``, and not on halves,
because normalisation depends on the batch: the loss of the same examples twice must be the loss of the examples. Random
losses (dropout) are only distinguished from sums, of which the loss is twice as large.
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
from mirrored.keras.keras_private import TorchTrainer, is_of_keras
from mirrored.keras.patching import around
from mirrored.keras.steps import Step, current, running
from towers.system.log import get_logger

log = get_logger("mirrored")

_TOLERANCE = 1e-3  # of float32 means, relative to the largest

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
