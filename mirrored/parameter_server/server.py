"""A server: parts of variables, and the optimizers that step them. It is an asynchronous actor of Ray.

[Note: one at a time] Its methods run in one thread, and each to its end or to an ``await``: a step is whole for those
who pull, as far as this server has it.
"""

from __future__ import annotations

import asyncio
import functools
import math
import operator
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from mirrored.parameter_server import references
from mirrored.parameter_server.layout import Part, Values

Settings = list[dict[str, Any]]
"""What each group of an optimizer has beside its parameters, such as the learning rate."""


@dataclass
class _Optimizer:
    """An optimizer over the parts that this server has.

    Attributes:
        waiting: gradients that the next step is the mean of, each with the worker that gave it.
        steps: how many it has made.
    """

    inner: torch.optim.Optimizer
    waiting: list[tuple[int | None, Values]]
    steps: int = 0


class Server:
    """See above; made by :class:`mirrored.parameter_server.strategy.ParameterServerStrategy`.

    By default it steps with each gradient as it comes, however old.

    Args:
        index: from 0.
        replicas_to_aggregate: a step is made with the mean of so many gradients (TF 1's ``SyncReplicasOptimizer``).
        staleness: how many steps a gradient's parameters may be old; older gradients are dropped.
    """

    def __init__(self, index: int, replicas_to_aggregate: int = 1, staleness: float = math.inf) -> None:
        self._index = index
        self._replicas_to_aggregate = replicas_to_aggregate
        self._staleness = staleness
        torch.sparse.check_sparse_tensor_invariants.disable()  # what torch's optimizers make; said, it warns of nothing
        self._parts: dict[Part, Tensor] = {}
        self._optimizers: dict[int, _Optimizer] = {}
        self._stepped = asyncio.Event()  # another one for each step
        self._waiting = 0  # pulls, for others' gradients

    def __repr__(self) -> str:
        """What Ray calls it, in errors that it raises and before what it prints."""
        return f"parameter server {self._index}"

    async def assign(self, values: Values) -> None:
        """Give parts values."""
        for part, value in values.items():
            self._parts.setdefault(part, value).copy_(value)

    async def add(self, differences: Values) -> None:
        """Add to buffers the mean of what all add in a step."""
        for part, difference in differences.items():
            if difference.is_floating_point():
                difference = difference / self._replicas_to_aggregate
            self._parts[part].add_(difference)

    async def pull(self, known: dict[Part, int], worker: int | None) -> tuple[Values, dict[Part, int], dict[int, int]]:
        """The parts whose versions are not those that are known, their versions (torch's, of the tensors), and how many
        steps each optimizer has made.

        Args:
            worker: who asks; without staleness it waits while a step lacks others' gradients beside its own.
        """
        while worker is not None and self._staleness < 1 and self._has_gradients_of(worker):
            self._waiting += 1
            await self._stepped.wait()
            self._waiting -= 1
        versions = {part: now for part, version in known.items() if (now := self._parts[part]._version) != version}
        changed = Values({part: self._parts[part].clone() for part in versions})  # Ray sends it while others step
        return changed, versions, {index: optimizer.steps for index, optimizer in self._optimizers.items()}

    def _has_gradients_of(self, worker: int) -> bool:
        return any(giver == worker for optimizer in self._optimizers.values() for giver, _ in optimizer.waiting)

    async def rows(self, wanted: Values) -> Values:
        """Rows of tables, numbered from the part's first."""
        return Values({part: self._parts[part].index_select(0, rows) for part, rows in wanted.items()})

    # -- optimizers --------------------------------------------------------------------------------------

    async def install(self, index: int, pickled: bytes) -> None:
        """Make an optimizer over this server's parts of its parameters.

        Args:
            pickled: the optimizer, without state.
        """
        inner = references.load(pickled, lambda reference: reference[1])
        for group in inner.param_groups:
            group["params"] = [own for i in group["params"] for part, own in self._parts.items() if part.variable == i]
        self._optimizers[index] = _Optimizer(inner, [])

    async def push(
        self, gradients: Values, index: int, settings: Settings, steps: list[int], worker: int | None
    ) -> None:
        """Step with the mean of several gradients, when all have come.

        Args:
            steps: how many it had made, on each server, when the parameters were pulled.
            worker: who gives them; None: the chief.
        """
        optimizer = self._optimizers[index]
        for group, changed in zip(optimizer.inner.param_groups, settings, strict=True):
            group.update(changed)
        if optimizer.steps - steps[self._index] <= self._staleness:
            optimizer.waiting.append((worker, gradients))
        if len(optimizer.waiting) == self._replicas_to_aggregate:
            self._step(optimizer)

    def _step(self, optimizer: _Optimizer) -> None:
        """Step with the mean of the gradients that wait."""
        gradients, optimizer.waiting = [given for _, given in optimizer.waiting], []
        for part in set().union(*gradients):
            total = functools.reduce(operator.add, [given[part] for given in gradients if part in given])
            self._parts[part].grad = total if len(gradients) == 1 else total / len(gradients)
            increment_version(self._parts[part])  # which an optimizer that writes to ``data`` does not
        optimizer.inner.step()
        optimizer.inner.zero_grad()
        optimizer.steps += 1
        self._stepped.set()
        self._stepped = asyncio.Event()

    async def flush(self, waiting: int) -> None:
        """Step with the gradients that wait, though they are fewer, if so many workers wait for others'."""
        for optimizer in self._optimizers.values():
            if optimizer.waiting and self._waiting >= waiting:
                self._step(optimizer)

    async def state(self, index: int) -> dict[Part, dict[str, Any]]:
        """The optimizer's state, by part."""
        inner = self._optimizers[index].inner
        return {part: inner.state[own] for part, own in self._parts.items() if own in inner.state}

    async def set_state(self, state: Mapping[Part, Mapping[str, Any]], index: int) -> None:
        """Replace the optimizer's state."""
        inner = self._optimizers[index].inner
        inner.state = defaultdict(dict, {self._parts[part]: dict(entry) for part, entry in state.items()})
