"""Whether a run trains or evaluates, as far as that can be told when it begins."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import nn


class RunKinds:
    """Learns which functions of a script train.

    A function is known by its name and the modes that it is called in, since one may do both. One that is called for
    the first time seems to evaluate where gradients are off, or where all models are in eval mode.

    Args:
        models: the models that are mirrored, or will be.
    """

    def __init__(self, models: Callable[[], Iterable[nn.Module]]) -> None:
        self._models = models
        self._evaluates: dict[Hashable, bool] = {}
        self._running: Hashable = None

    def begin(self, fn: Callable[..., Any]) -> bool:
        """A run of ``fn`` begins; whether it seems to evaluate."""
        learns = torch.is_grad_enabled() and {model.training for model in self._models()} != {False}
        self._running = getattr(fn, "__qualname__", type(fn)), learns
        return self._evaluates.get(self._running, not learns)

    def learn(self, evaluates: bool) -> None:
        """The run that has begun last is over."""
        self._evaluates[self._running] = evaluates
