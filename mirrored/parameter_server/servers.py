"""Servers: the actor that stores parts of variables, its callers, and the pickles between actors.

[Note: one at a time] A server is an asynchronous actor of Ray. Its methods run in one thread, each to its end or to an
``await``. So a pull sees either all or nothing of a step on this server.

[Note: what a function refers to] A scheduled function is pickled with all objects that it refers to. A pickled model
would be a copy, whose updates would be lost. So modules, variables and optimizers of the scope, per-worker data and the
strategy are sent as references, which the worker resolves to its own objects. All other objects are copied.

[Note: pickles] The pickles are read by the job's own actors, from Ray's channels, which require the job's secret
(:mod:`mirrored.parameter_server.nodes`).
"""

from __future__ import annotations

import asyncio
import functools
import io
import math
import operator
import pickle
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import ray
import torch
from ray.cloudpickle import CloudPickler
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from mirrored.parameter_server.layout import Part, PlacedVariable, Values
from towers.errors import PeerLostError


class ServedOptimizer(Optimizer):
    """A torch optimizer that steps for an optimizer of another library.

    Attributes:
        own: on workers: the library's optimizer, which functions use.
    """

    own: Any

    def update_settings(self) -> None:
        """Copies the library's settings into the groups, on the chief. The next call sends them."""

    def note_steps(self, steps: int) -> None:
        """Receives the number of steps of the servers, on a worker, after a pull."""

    def take_parts(self, owners: Sequence[int], parts: Sequence[Tensor]) -> None:
        """Receives a server's parts, each with the place of its parameter among all of them."""


class Library(Protocol):
    """The functions of another library that the strategy needs, on the chief, the workers and the servers."""

    def reduce(self, obj: Any) -> Any:
        """Returns how to pickle an object, as ``__reduce__`` does, or NotImplemented for objects of others."""

    def optimizer_of(self, obj: Any) -> ServedOptimizer | None:
        """Returns the torch optimizer that steps for an object, or None if there is none."""

    def written_by_forward(self, model: nn.Module) -> Iterable[Tensor]:
        """Returns the parameters of a model that a forward writes to."""

    def watch(self, layers: Iterable[nn.Module], refresh: Callable[[], None]) -> None:
        """Calls ``refresh``, a bound method, before each call of a layer that runs no hooks of torch."""


libraries: list[Library] = []
"""A library adds itself when it is imported. On workers and servers, the pickles of its objects import it."""


Reference = tuple[Any, ...]
"""A kind, such as "module", and the object's position."""


_COLOURS = "\x1b\\[\\d+m"  # ANSI colours in Ray's tracebacks


class ServerLostError(PeerLostError):
    """Reports that a server has ended, together with its part of the variables. Restart from the newest checkpoint."""


class ActorLostError(Exception):
    """Reports that an actor has ended. The message names the process, or that Ray ended it to save memory."""


def result_of(answer: Any, raiser: str) -> Any:
    """Waits for the result of an actor's method, and returns it.

    Args:
        raiser: the method's name in a traceback.

    Raises:
        BaseException: the exception that the method raised, with its remote traceback as the cause. An exception that
            cannot be pickled, or not be read here, is a RayError with its printed traceback.
        ActorLostError: the actor has ended.
    """
    trace = None
    try:
        return ray.get(answer)
    except RayTaskError as error:
        raised: BaseException = error.cause
        if not isinstance(raised, ServerLostError):
            trace = RuntimeError(f"raised by {raiser}:\n{re.sub(_COLOURS, '', str(error))}")
    except OutOfMemoryError as error:
        raised = ActorLostError(f"out of memory: {str(error).partition(chr(10))[0]}")
    except RayActorError as error:
        raised = ActorLostError(", ".join(re.findall(r"\b(?:pid|ip): \S+", str(error))) or str(error))
    raise raised from trace  # outside of the except block, whose error would keep all its frames alive


class Servers:
    """Calls methods of servers by their index, from 0.

    Args:
        actors: one for each index.

    Attributes:
        variables: the variables on the servers.
    """

    def __init__(self, actors: Sequence[Any]) -> None:
        self.actors = actors
        self.variables: list[PlacedVariable] = []

    def send(self, method: str, by_part: dict[Part, Any], *arguments: Any, to_all: bool = False) -> dict[int, Any]:
        """Calls a method of servers, each with the values of its own parts and the same other arguments.

        Args:
            to_all: whether servers without any of the parts are called, too.

        Returns:
            The argument for :meth:`receive`, without waiting.
        """
        own = {index: type(by_part)() for index in range(len(self.actors) if to_all else 0)}
        for part, value in by_part.items():
            own.setdefault(part.server, type(by_part)())[part] = value
        return {index: getattr(self.actors[index], method).remote(parts, *arguments) for index, parts in own.items()}

    def receive(self, sent: Mapping[int, Any]) -> dict[int, Any]:
        """Waits for the answers and returns them.

        Raises:
            ServerLostError: a server has ended.
        """
        answers = {}
        for index, answer in sent.items():
            try:
                answers[index] = result_of(answer, f"parameter server {index}")
            except ActorLostError as error:
                raise ServerLostError(
                    f"parameter server {index} ({error}) has ended, and with it {self._on(index)}. Start the job "
                    "with the same command again: it resumes from the newest checkpoint. If the server was not "
                    "killed on purpose, check its memory"
                ) from None
        return answers

    def ask(self, method: str, by_part: dict[Part, Any], *arguments: Any, to_all: bool = False) -> dict[int, Any]:
        """Calls :meth:`send`, and waits for the answers.

        Raises:
            ServerLostError: a server has ended.
        """
        return self.receive(self.send(method, by_part, *arguments, to_all=to_all))

    def ask_all(self, method: str, *arguments: Any) -> dict[int, Any]:
        """Calls a method of all servers with the same arguments, and waits for the answers.

        Raises:
            ServerLostError: a server has ended.
        """
        return self.receive({i: getattr(actor, method).remote(*arguments) for i, actor in enumerate(self.actors)})

    def _on(self, index: int) -> str:
        parts = [(v.name, part) for v in self.variables for part in v.parts if part.server == index]
        names = [f"rows {part.start} to {part.end - 1} of {name}" if part.end else name for name, part in parts]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "") or "no variables"


class _Pickler(CloudPickler):  # type: ignore[misc]
    def reducer_override(self, obj: Any) -> Any:
        for library in libraries:
            if (reduced := library.reduce(obj)) is not NotImplemented:
                return reduced
        return super().reducer_override(obj)


def pickle_by_reference(value: Any, reference_of: Callable[[Any], Reference | None] = lambda obj: None) -> bytes:
    """Pickles a value.

    Args:
        reference_of: returns the reference that is sent instead of an object, or None to pickle the object itself.

    Raises:
        TypeError: a part of the value cannot be pickled.
    """
    pickler: Any = _Pickler(file := io.BytesIO())
    pickler.persistent_id = reference_of
    try:
        pickler.dump(value)
    except (pickle.PicklingError, AttributeError, RecursionError) as error:
        raise TypeError(str(error)) from error
    return file.getvalue()


def unpickle(data: bytes, resolve: Callable[[Reference], Any] = lambda reference: None) -> Any:
    """Reads a result of :func:`pickle_by_reference`.

    Args:
        resolve: returns the object of a reference.
    """
    unpickler: Any = pickle.Unpickler(io.BytesIO(data))
    unpickler.persistent_load = resolve
    return unpickler.load()


Settings = list[dict[str, Any]]
"""The settings of each group of an optimizer, such as the learning rate, without parameters."""

Request = tuple[int, int, int]
"""The number of a call, that of the first unfinished call, and the number of the request in its call."""


@dataclass
class _Optimizer:
    """An optimizer over the parts that this server stores.

    Attributes:
        waiting: the gradients and the differences of buffers of each push, with its worker. A step uses their means.
        steps: the number of steps.
    """

    inner: torch.optim.Optimizer
    waiting: list[tuple[int | None, Values]]
    steps: int = 0


class Server:
    """A server that :class:`mirrored.parameter_server.strategy.ParameterServerStrategy` creates.

    By default, it steps with each gradient on arrival, regardless of its age.

    Args:
        index: from 0.
        replicas_to_aggregate: the number of gradients whose mean is used in a step (TF 1's ``SyncReplicasOptimizer``).
        staleness: the maximum age, in steps, of the parameters of a gradient. Older gradients are dropped.
    """

    def __init__(self, index: int, replicas_to_aggregate: int = 1, staleness: float = math.inf) -> None:
        self._index = index
        self._replicas_to_aggregate = replicas_to_aggregate
        self._staleness = staleness
        torch.sparse.check_sparse_tensor_invariants.disable()  # torch's optimizers violate them; this avoids a warning
        self._parts: dict[Part, Tensor] = {}
        self._buffers: set[Part] = set()  # of which differences have arrived
        self._optimizers: dict[int, _Optimizer] = {}
        self._stepped = asyncio.Event()  # replaced after each step
        self._waiting = 0  # pulls that wait for others' gradients
        self._received: set[tuple[int, int]] = set()  # the requests of unfinished calls
        self._first_unfinished = 0

    def __repr__(self) -> str:
        """Returns the actor's name, which Ray shows in errors and before its output."""
        return f"parameter server {self._index}"

    async def assign(self, values: Values) -> None:
        """Sets the values of parts."""
        for part, value in values.items():
            self._parts.setdefault(part, value).copy_(value)

    def _is_repeated(self, request: Request | None) -> bool:
        """Notes a request. Returns whether a lost worker has sent it already."""
        if request is None:
            return False
        call, first, number = request
        if call < self._first_unfinished:  # by now, another worker has repeated the call to its end
            return True
        if first > self._first_unfinished:
            self._first_unfinished = first
            self._received = {known for known in self._received if known[0] >= first}
        if (call, number) in self._received:
            return True
        self._received.add((call, number))
        return False

    async def add(self, differences: Values, request: Request | None) -> None:
        """Adds differences to buffers. Floating-point differences are divided by ``replicas_to_aggregate``."""
        if self._is_repeated(request):
            return
        for part, difference in differences.items():
            self._add(part, [difference], self._replicas_to_aggregate)

    def _add(self, part: Part, differences: list[Tensor], count: int) -> None:
        """Adds the sum of differences to a buffer; of floating-point differences, divided by ``count``."""
        total = functools.reduce(operator.add, differences)
        if total.is_floating_point():
            total = total / count
        own = self._parts[part]
        own.add_(total if own.is_floating_point() else total.round().to(own.dtype))

    async def pull(self, known: dict[Part, int], worker: int | None) -> tuple[Values, dict[Part, int], dict[int, int]]:
        """Returns the parts whose versions differ from ``known``.

        Args:
            known: by part, the version that the caller has.
            worker: the worker that calls; None for the chief. If ``staleness`` is 0 and a step waits for others'
                gradients in addition to this worker's, the call waits, too.

        Returns:
            The changed parts, their versions (torch's, of the tensors), and the number of steps of each optimizer.
        """
        while worker is not None and self._staleness < 1 and self._has_gradients_of(worker):
            self._waiting += 1
            await self._stepped.wait()
            self._waiting -= 1
        versions = {part: now for part, version in known.items() if (now := self._parts[part]._version) != version}
        changed = Values({part: self._parts[part].clone() for part in versions})  # Ray may send it during other steps
        return changed, versions, {index: optimizer.steps for index, optimizer in self._optimizers.items()}

    def _has_gradients_of(self, worker: int) -> bool:
        return any(giver == worker for optimizer in self._optimizers.values() for giver, _ in optimizer.waiting)

    async def rows(self, wanted: Values) -> Values:
        """Returns rows of tables. They are numbered from the part's first row."""
        return Values({part: self._parts[part].index_select(0, rows) for part, rows in wanted.items()})

    # -- optimizers --------------------------------------------------------------------------------------

    async def install(self, index: int, pickled: bytes) -> None:
        """Creates an optimizer over this server's parts of its parameters.

        Args:
            pickled: the optimizer, without state.
        """
        inner = unpickle(pickled, lambda reference: reference[1])
        for group in inner.param_groups:
            parts = [(place, p) for place, i in enumerate(group["params"]) for p in self._parts if p.variable == i]
            group["params"] = [self._parts[part] for _, part in parts]
            if isinstance(inner, ServedOptimizer):
                inner.take_parts([place for place, _ in parts], group["params"])
        self._optimizers[index] = _Optimizer(inner, [])

    async def push(
        self,
        values: Values,
        index: int,
        settings: Settings,
        steps: list[int],
        worker: int | None,
        buffers: set[Part],
        request: Request | None,
    ) -> None:
        """Adds gradients, and steps with their mean when all have arrived. A repeated request has no effect.

        Args:
            values: gradients of parameters, and differences of ``buffers``.
            steps: the optimizer's number of steps on each server at the time of the pull.
            worker: the worker that sends them; None for the chief.
        """
        if self._is_repeated(request):
            return
        optimizer = self._optimizers[index]
        for group, changed in zip(optimizer.inner.param_groups, settings, strict=True):
            group.update(changed)
        if optimizer.steps - steps[self._index] <= self._staleness:
            optimizer.waiting.append((worker, values))
            self._buffers |= buffers
        if len(optimizer.waiting) == self._replicas_to_aggregate:
            self._step(optimizer)

    def _step(self, optimizer: _Optimizer) -> None:
        """Steps with the mean of the waiting gradients."""
        values, optimizer.waiting = [given for _, given in optimizer.waiting], []
        for part in set().union(*values):
            here = [given[part] for given in values if part in given]
            if part in self._buffers:
                self._add(part, here, len(values))
                continue
            total = functools.reduce(operator.add, here)
            self._parts[part].grad = total if len(values) == 1 else total / len(values)
            increment_version(self._parts[part])  # an optimizer that writes to ``data`` does not increment it
        optimizer.inner.step()
        optimizer.inner.zero_grad()
        optimizer.steps += 1
        self._stepped.set()
        self._stepped = asyncio.Event()

    async def flush(self, waiting: int) -> None:
        """Steps with fewer gradients than usual if at least ``waiting`` workers wait for others' gradients."""
        for optimizer in self._optimizers.values():
            if optimizer.waiting and self._waiting >= waiting:
                self._step(optimizer)

    async def state(self, index: int) -> dict[Part, dict[str, Any]]:
        """Returns the optimizer's state, by part."""
        inner = self._optimizers[index].inner
        return {part: inner.state[own] for part, own in self._parts.items() if own in inner.state}

    async def set_state(self, state: Mapping[Part, Mapping[str, Any]], index: int) -> None:
        """Replaces the optimizer's state."""
        inner = self._optimizers[index].inner
        inner.state = defaultdict(dict, {self._parts[part]: dict(entry) for part, entry in state.items()})
