"""A process's copies of the variables: pulled before they are used, and never written to but by an optimizer's push.

[Note: rows that are looked up] An ``nn.Embedding`` or ``nn.EmbeddingBag`` with ``sparse=True`` pulls the rows that it
looks up, in each forward; the others of its weight are not there. Its gradient has these rows only, as has the push.

[Note: what is pushed] Gradients, when an optimizer steps; what a call has added to buffers (BatchNorm's statistics),
when it ends. A parameter that a script writes to itself would be this process's alone, so that is an error, but on the
chief, whose writes count.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mirrored.parameter_server.errors import reach
from mirrored.parameter_server.layout import Part, PlacedVariable
from mirrored.parameter_server.server import Settings, Synchronous

TABLES = (nn.Embedding, nn.EmbeddingBag)


class NotYet(Exception):
    """Synchronous training: others have to give their gradients before this process may pull again."""


class Replica:
    """The variables as one process has them.

    Args:
        servers: the actors.
        synchronous: whether, and how, they step with the mean of several gradients.
        publishes: whether what the script writes to variables is assigned on the servers: the chief's is.

    Attributes:
        optimizers: whose steps are pushed.
    """

    def __init__(self, servers: Sequence[Any], synchronous: Synchronous | None, publishes: bool = False) -> None:
        self._servers = servers
        self._synchronous = synchronous
        self._publishes = publishes
        self._variables: Sequence[PlacedVariable] = ()
        self._tensors: list[Tensor] = []
        self._index: dict[int, int] = {}  # by the id of a tensor
        self._known: dict[Part, int] = {}  # versions
        self._noted: list[int] = []  # torch's versions of the tensors, after the last pull or assignment
        self._buffers: dict[int, Tensor] = {}  # as they were pulled
        self._steps: list[dict[int, int]] = [{} for _ in servers]  # of each optimizer, when they were pulled
        self._awaited: list[dict[int, int]] = [{} for _ in servers]  # how many the next pull waits for
        self.optimizers: list[Optimizer] = []
        self._is_stale = self._has_stale_tables = True

    def add(self, variables: Sequence[PlacedVariable], tensors: Sequence[Tensor], models: Iterable[nn.Module]) -> None:
        """Take variables, of which the first ones are here already, and watch models.

        Before a model's forward the variables are pulled, and before a table's its rows.
        """
        new = range(len(self._tensors), len(tensors))
        self._variables, self._tensors = variables, [*tensors]
        self._index = {id(tensor): index for index, tensor in enumerate(tensors)}
        self._known |= {part: 0 for i in new if not variables[i].table for part in variables[i].parts}
        self._noted += [tensors[i]._version for i in new]
        for model in models:
            model.register_forward_pre_hook(lambda *_: self.refresh())
            for layer in model.modules():
                if isinstance(layer, TABLES) and variables[self._index[id(layer.weight)]].table:
                    layer.register_forward_pre_hook(self._pull_rows, with_kwargs=True)

    # -- values ------------------------------------------------------------------------------------------

    def expire(self) -> None:
        """Pull again when variables are used next: others may have changed them."""
        self._is_stale = self._has_stale_tables = True

    def refresh(self) -> None:
        """Pull what has changed, but for tables.

        Raises:
            NotYet: see there; servers wait a second for it.
        """
        if self._publishes:
            self.assign(self.written())
        if not self._is_stale:
            return
        self._is_stale = False  # before it asks: another thread may say meanwhile that it is
        asked: list[dict[Part, int]] = [{} for _ in self._servers]
        for part, version in self._known.items():
            asked[part.server][part] = version
        answers = reach([s.pull.remote(*a) for s, *a in zip(self._servers, asked, self._awaited, strict=True)])
        if None in answers:
            self._is_stale = True
            raise NotYet
        for server, (changed, steps) in enumerate(answers):
            self._steps[server] = steps
            for part, (version, value) in changed.items():
                self._known[part] = version
                part.of(self._tensors[part.variable].data).copy_(value)
        for index, variable in enumerate(self._variables):
            if variable.kind == "buffer":
                self._buffers[index] = self._tensors[index].clone()

    def _pull_rows(self, table: nn.Module, args: Any, kwargs: Any) -> None:
        inputs = args[0] if args else kwargs["input"]
        rows = torch.unique(inputs)
        weight: Any = table.weight
        pieces = []
        for part in self._variables[self._index[id(weight)]].parts:
            inside = rows if not part.end else rows[(rows >= part.start) & (rows < part.end)]
            if len(inside):
                pieces.append((inside, self._servers[part.server].rows.remote(part, inside - part.start)))
        for (inside, _), values in zip(pieces, reach([answer for _, answer in pieces]), strict=True):
            weight.data.index_copy_(0, inside, values)

    def pull_all(self) -> None:
        """Pull everything, tables as well."""
        self.refresh()
        if not self._has_stale_tables:
            return
        self._has_stale_tables = False
        tables = [part for variable in self._variables if variable.table for part in variable.parts]
        answers = reach([self._servers[part.server].pull.remote({part: 0}, {}) for part in tables])
        for part, (changed, _) in zip(tables, answers, strict=True):
            part.of(self._tensors[part.variable].data).copy_(changed[part][1])

    def assign(self, indices: Iterable[int]) -> None:
        """Give variables, on the servers, the values that they have here."""
        values: list[dict[Part, Tensor]] = [{} for _ in self._servers]
        for index in indices:
            for part in self._variables[index].parts:
                values[part.server][part] = part.of(self._tensors[index].detach())
            self._noted[index] = self._tensors[index]._version
        reach([s.assign.remote(given) for s, given in zip(self._servers, values, strict=True) if given])

    def written(self) -> list[int]:
        """The variables that were written to since :meth:`assign`, or since this was made, other than by a pull."""
        return [i for i, tensor in enumerate(self._tensors) if tensor._version != self._noted[i]]

    def refuse_writes(self) -> None:
        """See that a call has left parameters alone.

        Raises:
            RuntimeError: it has not; what it wrote is taken back by the next pull.
        """
        for index in self.written():
            self._noted[index] = self._tensors[index]._version
            self._known |= {part: -1 for part in self._variables[index].parts if part in self._known}
            raise RuntimeError(
                f"a scheduled function wrote to {self._variables[index].name} itself, which would stay on this worker: "
                "let an optimizer step it, or write to it on the chief, between two calls of the coordinator"
            )

    def add_buffers(self) -> None:
        """Push what has been added to buffers since they were pulled."""
        differences: list[dict[Part, Tensor]] = [{} for _ in self._servers]
        for index, before in self._buffers.items():
            tensor = self._tensors[index]
            self._noted[index] = tensor._version
            if not torch.equal(tensor, before):
                (part,) = self._variables[index].parts
                differences[part.server][part] = tensor - before
        reach([s.add.remote(given) for s, given in zip(self._servers, differences, strict=True) if given])

    # -- optimizers --------------------------------------------------------------------------------------

    def adopt(self, optimizer: Optimizer) -> None:
        """Let an optimizer's ``step`` push gradients; its index is the number of those before."""
        optimizer.step = functools.partial(self._push, len(self.optimizers), optimizer)  # type: ignore[method-assign]
        self.optimizers.append(optimizer)
        self.expire()  # how many steps it has made is pulled, too

    def _push(self, index: int, optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        gradients: list[dict[Part, Tensor]] = [{} for _ in self._servers]  # one without any counts the step, too
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for part in self.parts_of(parameter) if parameter.grad is not None else ():
                    gradients[part.server][part] = _gradient_of(part, parameter.grad)
        settings, pushed = settings_of(optimizer), []
        for server, given, steps, awaited in zip(self._servers, gradients, self._steps, self._awaited, strict=True):
            pushed.append(server.push.remote(index, given, settings, steps[index]))
            if self._synchronous is not None:
                awaited[index] = steps[index] + 1 - self._synchronous.staleness
        reach(pushed)
        self.expire()
        return result

    def parts_of(self, parameter: Tensor) -> tuple[Part, ...]:
        """Where a parameter lies."""
        return self._variables[self._index[id(parameter)]].parts

    def knows(self, tensor: Tensor) -> bool:
        """Whether a tensor is one of the variables."""
        return id(tensor) in self._index


def _gradient_of(part: Part, gradient: Tensor) -> Tensor:
    if not gradient.is_sparse:
        return part.of(gradient)
    gradient = gradient.coalesce()
    if not part.end:
        return gradient
    rows = gradient.indices()[0]
    inside = (rows >= part.start) & (rows < part.end)
    shape = (part.end - part.start, *gradient.shape[1:])
    return torch.sparse_coo_tensor(
        rows[inside][None] - part.start, gradient.values()[inside], shape, is_coalesced=True, check_invariants=False
    )


def settings_of(optimizer: Optimizer) -> Settings:
    """What the groups have beside their parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
