"""The running step: this tower's share of a global batch, and the weight of its numbers.

See [Note: examples are weighted] in :mod:`mirrored.keras`. At the start of backward, the gradient of each tower's loss
is multiplied by the number of towers and by the share's fraction of the examples. The average over towers is then that
of the examples. This is correct for every loss, and for the gradients that BatchNorm over the global batch gathers.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mirrored.keras.keras_private import around
from mirrored.shares import Share
from mirrored.strategy.base import Strategy
from towers.system.torch_private import disable_dynamo


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of a model on several towers.

    Attributes:
        share: this tower's share. If it has no examples, the tower computes on a stand-in.
        alone: whether other towers do not take part in the computation, so that collectives are impossible.
        combines: whether the towers combine a metric's variable after the step.
    """

    strategy: Strategy
    share: Share
    alone: bool = False
    combines: Callable[[Any], bool] = lambda variable: True

    @property
    def fraction(self) -> float:
        """The fraction of the global batch's examples that are in this share."""
        return self.share.local / self.share.total if self.share.total else 0.0

    def all_sum(self, value: Tensor) -> Tensor:
        """Returns the sum of a number over all towers. A stand-in adds 0."""
        own = value.detach() if self.share.local else torch.zeros_like(value)
        total: Tensor = self.strategy.reduce("sum", own)
        return total

    def as_mean(self, total: Tensor) -> Tensor:
        """Returns a tower's divisor, for which the mean of the quotients over examples is the quotient by ``total``.

        In symbols: ``sum(f[t] * s[t] / (total * f[t])) == sum(s[t]) / total``.
        """
        return total * self.fraction if self.share.local else torch.ones_like(total)


_current: Step | None = None


def current() -> Step | None:
    """Returns the running step, or None outside of steps and on one tower."""
    return _current


@contextlib.contextmanager
def running(step: Step) -> Iterator[None]:
    """Makes ``step`` the running step inside the context."""
    global _current
    outer, _current = _current, step
    try:
        yield
    finally:
        _current = outer


_in_backward = False
"""Whether a weight is already applied: under ``torch.device`` and in reentrant checkpoints, backward calls itself."""


@around(torch.autograd, "backward")
def _backward(original: Any, *args: Any, **kwargs: Any) -> Any:
    if _current is None or _in_backward:
        return original(*args, **kwargs)
    return _backward_of(_current, original, *args, **kwargs)


@disable_dynamo
def _backward_of(step: Step, original: Any, tensors: Any, grad_tensors: Any = None, *args: Any, **kwargs: Any) -> Any:
    global _in_backward
    if (weight := step.fraction * step.strategy.num_replicas_in_sync) != 1:
        if isinstance(tensors, Tensor):
            tensors = (tensors,)
        if grad_tensors is None or isinstance(grad_tensors, Tensor):
            grad_tensors = (grad_tensors,) * len(tensors)
        grad_tensors = _weighted(tensors, grad_tensors, weight)
    _in_backward = True
    try:
        return original(tensors, grad_tensors, *args, **kwargs)
    finally:
        _in_backward = False


def _weighted(tensors: Sequence[Tensor], gradients: Sequence[Tensor | None], weight: float) -> list[Tensor | None]:
    return [
        gradient * weight if gradient is not None else torch.full_like(tensor, weight) if tensor.numel() == 1 else None
        for tensor, gradient in zip(tensors, gradients, strict=True)
    ]
