"""The ways of synchronising towers that step by themselves, and what they cannot be combined with."""

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
    """The outer optimizer of the paper on DiLoCo (arXiv:2311.08105): SGD, lr 0.7, Nesterov momentum 0.9."""
    return torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True)


@dataclasses.dataclass(frozen=True)
class LocalSGD:
    """Every ``every`` training steps the parameters become their mean over the towers (arXiv:1805.09767).

    Args:
        every: steps from one synchronisation to the next, at least 1.

    Raises:
        ValueError: ``every`` is no whole number above 0.
    """

    every: int

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise ValueError(f"{type(self).__name__}: every is {self.every!r}, but must be a whole number of steps > 0")


@dataclasses.dataclass(frozen=True)
class DiLoCo(LocalSGD):
    """Every ``every`` training steps an outer optimizer steps by the mean of what the towers have changed.

    Its parameters are *anchors*, copies of the model's as they were after the last synchronisation (at least float32);
    their gradient is the mean over the towers of anchor minus parameter. All towers go on from the new anchors.

    Args:
        every: steps from one synchronisation to the next, at least 1.
        outer: makes the outer optimizer of a list of anchors; the same one on all towers. Parameters that are first
            trained after the first synchronisation are added to it by ``add_param_group``. Default: SGD with a learning
            rate of 0.7 and Nesterov momentum of 0.9.

    Raises:
        ValueError: ``every`` is no whole number above 0.
        TypeError: ``outer`` is no function; at the first synchronisation, when it has not returned an optimizer.
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
    """The way of synchronising among a strategy's options, by name; None where ``mirrored verify`` leaves it out.

    Raises:
        TypeError: ``synchronize`` is none of the ways above.
        ValueError: it is combined with what averages gradients or shares out the optimizer's step.
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
