"""How towers that step independently synchronise, and which options this excludes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mirrored.interceptor import interceptor
from towers.options import CommunicationOptions

_REFUSED = {
    "central": "CentralStorageStrategy has one copy of the parameters: take MirroredStrategy",
    "shard_optimizer": "shard_optimizer=True shares out one step: leave one of the two out",
    "virtual_towers": "virtual_towers promise the same bits on any number of towers: leave one of the two out",
    "nonfinite_gradients": "nonfinite_gradients={!r} needs communication in every backward: omit it",
}


def nesterov(anchors: Iterable[nn.Parameter]) -> Optimizer:
    """Returns the outer optimizer of the DiLoCo paper (arXiv:2311.08105): SGD, lr 0.7, Nesterov momentum 0.9."""
    return torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True)


@dataclasses.dataclass(frozen=True)
class LocalSGD:
    """Replaces the parameters by their mean over the towers every ``every`` training steps (arXiv:1805.09767).

    Args:
        every: the number of steps between synchronisations, at least 1.

    Raises:
        ValueError: ``every`` is not a whole number above 0.
    """

    every: int

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"{type(self).__name__}: every is {self.every!r}, but must be a whole number of steps > 0")


@dataclasses.dataclass(frozen=True)
class DiLoCo(LocalSGD):
    """Steps an outer optimizer with the mean of the towers' changes every ``every`` training steps.

    The outer optimizer's parameters are *anchors*: copies of the model's parameters after the last synchronisation, at
    least in float32. Their gradient is the mean over the towers of anchor minus parameter. All towers continue from the
    new anchors.

    Args:
        every: the number of steps between synchronisations, at least 1.
        outer: creates the outer optimizer from a list of anchors; it must be the same on all towers. Parameters that
            are first trained after the first synchronisation are added by ``add_param_group``. Default: SGD with a
            learning rate of 0.7 and Nesterov momentum of 0.9.

    Raises:
        ValueError: ``every`` is not a whole number above 0.
        TypeError: ``outer`` is not a function; or, at the first synchronisation, it did not return an optimizer.
    """

    outer: Callable[[Iterable[nn.Parameter]], Optimizer] = dataclasses.field(default=nesterov, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.outer):
            raise TypeError(
                f"DiLoCo(outer={self.outer!r}): give a function that makes the outer optimizer of the parameters that "
                "it is given: outer=lambda parameters: torch.optim.SGD(parameters, lr=0.7)"
            )


def checked(training: Mapping[str, Any], communication: CommunicationOptions) -> LocalSGD | None:
    """Returns the value of ``synchronize`` among a strategy's options, or None if ``mirrored verify`` disables it.

    Raises:
        TypeError: ``synchronize`` is not one of the classes above.
        ValueError: it is combined with an option that averages gradients or shards the optimizer's step.
    """
    way = training["synchronize"]
    if not isinstance(way, LocalSGD):
        raise TypeError(
            f"synchronize is {way!r}, but has to be mirrored.LocalSGD(every=16), "
            "mirrored.DiLoCo(every=16), or None: gradients are averaged in every step"
        )
    for name, reason in _REFUSED.items():
        if training[name] not in (None, False, "ignore"):
            raise ValueError(f"with synchronize= every tower steps by itself, while {reason.format(training[name])}")
    if communication.wire_dtype != "same" and not isinstance(way, DiLoCo):
        raise ValueError(
            f"wire_dtype={communication.wire_dtype!r} would round the parameters that LocalSGD averages: omit "
            "it, or use DiLoCo, which sends the towers' changes"
        )
    chosen: LocalSGD | None = interceptor().averaging(way)
    return chosen
