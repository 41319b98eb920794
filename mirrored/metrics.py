"""Metric objects of torchmetrics over shares that can be empty.

torchmetrics adds its metrics' states up over the ranks of torch.distributed when they are computed, so shares without
repetition count every example once. Two things go wrong with empty shares: many metrics cannot be updated with them,
and a metric that keeps examples and has none gathers a state of another shape and dtype than the others' (Gloo then
aborts the process). Both have their place in torchmetrics: ``update`` and ``dist_sync_fn``.
"""

from __future__ import annotations

import copy
import functools
import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from towers import tree as trees
from towers.collectives import values
from towers.collectives.agreement import announce
from towers.collectives.communicator import Communicator


def prepare(module: nn.Module, comm: Communicator) -> None:
    """Let the metrics in ``module``, which can be one itself, take empty shares."""
    for part in module.modules() if "torchmetrics" in sys.modules else ():
        if _is_a(part, "Metric", "MetricCollection"):
            if not isinstance(part.update, SkipEmpty):
                part.update = SkipEmpty(part, part.update)  # type: ignore[assignment, arg-type]
            if _is_a(part, "Metric"):
                part.dist_sync_fn = GatherStates(comm)  # type: ignore[assignment]


def states_of(module: nn.Module) -> dict[str, Any]:
    """What the metrics in ``module`` have counted, by path: torchmetrics leaves it out of a ``state_dict()``."""
    found = {}
    for path, part in module.named_modules() if "torchmetrics" in sys.modules else ():
        if _is_a(part, "Metric"):
            metric: Any = part
            found[path] = {"state": dict(metric.metric_state), "updates": metric._update_count}
    return found


def set_states_of(module: nn.Module, states: dict[str, Any]) -> None:
    """Let the metrics in ``module`` go on where :func:`states_of` was taken.

    Raises:
        KeyError: there is no such metric.
    """
    parts = dict(module.named_modules()) if states else {}
    for path, saved in states.items():
        metric: Any = parts[path]
        move = functools.partial(trees.map_leaves, operator.methodcaller("to", metric.device))
        for name, value in saved["state"].items():
            setattr(metric, name, move(value))
        metric._update_count, metric._computed = saved["updates"], None


def _is_a(module: nn.Module, *names: str) -> bool:
    bases = {f"{base.__module__.split('.')[0]}.{base.__name__}" for base in type(module).__mro__}
    return not bases.isdisjoint(f"torchmetrics.{name}" for name in names)


class SkipEmpty:
    """A metric's or a collection's ``update`` that does nothing when it is given no examples."""

    def __init__(self, owner: Any, update: Callable[..., Any]) -> None:
        self._owner = owner
        self._update = update

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in trees.leaves((args, kwargs)) if isinstance(leaf, Tensor) and leaf.dim()]
        if tensors and all(tensor.shape[0] == 0 for tensor in tensors):
            return None
        return self._update(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> SkipEmpty:
        owner: Any = copy.deepcopy(self._owner, memo)  # it is being copied: a collection, since metrics leave it out
        return SkipEmpty(owner, functools.partial(type(owner).update, owner))


class GatherStates:
    """A ``dist_sync_fn`` of torchmetrics: every tower's state, of any size along the first dimension.

    Raises:
        DisagreementError: towers are doing different things; on all of them.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def __call__(self, state: Tensor, group: object = None) -> list[Tensor]:
        said = announce(self._comm, "compute() of a metric", [str(state.dtype), list(state.shape)])
        described = [other.details for other in said]
        # Who has kept no examples does not know what they would have looked like.
        dtype, like = next((found for found in described if not _is_nothing(found)), described[0])
        state = state.to(getattr(torch, dtype.removeprefix("torch.")))
        shapes = [[0, *like[1:]] if _is_nothing(found) else found[1] for found in described]
        state = state.reshape(shapes[self._comm.index]).contiguous()
        if not like:
            return list(self._comm.all_gather(state).unbind())
        joined = values.join(self._comm, state, shapes, 0)
        return list(joined.split([shape[0] for shape in shapes]))

    def __deepcopy__(self, memo: object) -> GatherStates:
        return self


def _is_nothing(described: list[Any]) -> bool:
    shape: list[int] = described[1]
    return shape == [0]
