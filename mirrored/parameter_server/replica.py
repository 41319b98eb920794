"""A process's copies of the variables: pulled before they are used, and never written to but by an optimizer's push.

[Note: rows that are looked up] An ``nn.Embedding`` or ``nn.EmbeddingBag`` with ``sparse=True`` pulls the rows that it
looks up, in each forward; the others of its weight are not there. Its gradient has these rows only, as has the push.

[Note: what is pushed] Gradients, when an optimizer steps; what a call has added to buffers (BatchNorm's statistics),
when it ends. Servers' answers to both are waited for together, before the next pull or at the end of the call. A
parameter that a script writes to itself would be this process's alone, so that is an error, but on the chief, whose
writes count.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mirrored.parameter_server.layout import Part, PlacedVariable, Values
from mirrored.parameter_server.references import Reference
from mirrored.parameter_server.server import Settings
from mirrored.parameter_server.servers import Servers
from towers.system.torch_private import count_as_stepped, disable_dynamo

TABLES = (nn.Embedding, nn.EmbeddingBag)

Conditions = tuple[list[Settings], list[bool], list[bool]]
"""What the chief may change between two calls: the settings of optimizers, whether each module trains, and whether each
variable requires a gradient."""


class Replica:
    """The variables as one process has them.

    Args:
        servers: where they are.
        worker: the index of the worker that this process is; None: the chief's, whose writes are assigned on servers.

    Attributes:
        variables, tensors: what they are, and this process's copies.
        references: what stands for tensors and modules where a function is sent, by their ids.
        modules: those that have them, from the outermost ones inwards.
        optimizers: whose steps are pushed.
    """

    def __init__(self, servers: Servers, worker: int | None = None) -> None:
        self._servers = servers
        self._worker = worker
        self.variables: list[PlacedVariable] = []
        servers.variables = self.variables
        self.tensors: list[Tensor] = []
        self.references: dict[int, Reference] = {}
        self.modules: list[nn.Module] = []
        self._known: dict[Part, int] = {}  # versions
        self._places: list[tuple[nn.Module, str, Tensor]] = []  # the attributes of modules that are variables
        self._noted: list[int] = []  # torch's versions of the tensors, after the last pull or assignment
        self._buffers: dict[int, Tensor] = {}  # as they were pulled by a worker
        self._steps: list[dict[int, int]] = [{} for _ in servers.actors]  # of each optimizer, when they were pulled
        self._sent: list[dict[int, Any]] = []  # what servers have not answered yet
        self.optimizers: list[Optimizer] = []
        self._age = 0  # how often others may have changed variables
        self._pulled = self._tables_pulled = -1  # the age of what is here

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a model is nobody's: its hooks are those of a replica without variables."""
        return Replica, (Servers(()),)

    def add(self, variables: Sequence[PlacedVariable], tensors: Collection[Tensor]) -> None:
        """Take more variables; those of the chief count as written."""
        self.references |= {id(tensor): ("variable", i) for i, tensor in enumerate(tensors, len(self.tensors))}
        self.variables += variables
        self.tensors += tensors
        self._known |= {part: 0 for variable in variables if not variable.table for part in variable.parts}
        self._noted += [-1 if self._worker is None else tensor._version for tensor in tensors]

    def watch(self, models: Iterable[nn.Module]) -> None:
        """Pull before a model's forward, rows before a table's, and all before a ``state_dict()`` on the chief."""
        for model in models:
            for layer in model.modules():
                self.references[id(layer)] = ("module", len(self.modules))
                self.modules.append(layer)
                if self._worker is None:
                    layer.register_state_dict_pre_hook(self.pull_all)
                if layer is model or self._worker is not None:  # a function may call a part of a model only
                    layer.register_forward_pre_hook(self.refresh)
                tensors = *layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)
                self._places += [(layer, name, tensor) for name, tensor in tensors]
                if isinstance(layer, TABLES) and self.variables[self.references[id(layer.weight)][1]].table:
                    layer.register_forward_pre_hook(self._pull_rows, with_kwargs=True)

    def conditions(self) -> Conditions:
        """The conditions as they are now, on the chief."""
        settings = [settings_of(optimizer) for optimizer in self.optimizers]
        training = [module.training for module in self.modules]
        return settings, training, [tensor.requires_grad for tensor in self.tensors]

    def adopt_conditions(self, conditions: Conditions) -> None:
        """Take over the chief's conditions; what was added since then is not in them."""
        optimizers, training, trainable = conditions
        for optimizer, settings in zip(self.optimizers, optimizers, strict=False):
            for group, changed in zip(optimizer.param_groups, settings, strict=True):
                group.update(changed)
        for module, trains in zip(self.modules, training, strict=False):
            module.training = trains
        for tensor, requires_grad in zip(self.tensors, trainable, strict=False):
            tensor.requires_grad_(requires_grad).grad = None

    # -- values ------------------------------------------------------------------------------------------

    def expire(self) -> None:
        """Pull again when variables are used next: others may have changed them."""
        self._age += 1

    @disable_dynamo
    def refresh(self, *_: object) -> None:
        """Pull what has changed, but for tables; in synchronous training when others have given their gradients."""
        if self._worker is None:
            self.assign(self.written())
        if self._pulled == (age := self._age):  # another thread may expire it while this one asks
            return
        self.add_buffers()
        self.settle()
        answers = self._servers.ask("pull", self._known, self._worker, to_all=True)
        for server, (changed, versions, steps) in answers.items():
            self._steps[server] = steps
            self._known |= versions
            self._take(changed)
        self._pulled = age

    @disable_dynamo
    def _pull_rows(self, table: nn.Module, args: Any, kwargs: Any) -> None:
        self.refresh()  # on the chief, which may call a table alone after it has written to it
        rows = torch.unique(args[0] if args else kwargs["input"]).long()
        weight: Any = table.weight
        wanted = Values()
        for part in self.parts_of(weight):
            inside = rows[(rows >= part.start) & (rows < part.end)] - part.start if part.end else rows
            if len(inside):
                wanted[part] = inside
        for answer in self._servers.ask("rows", wanted).values():
            for part, found in answer.items():
                part.of(weight.data).index_copy_(0, wanted[part], found)

    def pull_all(self, *_: object) -> None:
        """Pull everything, tables as well."""
        self.refresh()
        if self._tables_pulled == (age := self._age):
            return
        for variable in self.variables:  # one after the other: they are large
            for part in variable.parts if variable.table else ():
                self._take(self._servers.ask("pull", {part: 0}, None)[part.server][0])
        self._tables_pulled = age

    def _take(self, values: Values) -> None:
        for part, value in values.items():
            part.of(self.tensors[part.variable].data).copy_(value)
            if self._worker is not None and not self.variables[part.variable].trained:
                self._buffers[part.variable] = value

    def settle(self) -> None:
        """Wait until servers have taken what was pushed."""
        while self._sent:
            self._servers.receive(self._sent.pop(0))

    def assign(self, indices: Iterable[int]) -> None:
        """Give variables, on the servers, the values that they have here."""
        values = Values()
        for index in indices:
            values |= {part: part.of(self.tensors[index].detach()) for part in self.variables[index].parts}
            self._noted[index] = self.tensors[index]._version
        self._servers.ask("assign", values)

    def written(self) -> list[int]:
        """The variables that were written to since :meth:`assign` or :meth:`add`, other than by a pull."""
        return [i for i, tensor in enumerate(self.tensors) if tensor._version != self._noted[i]]

    @torch.no_grad()
    def rebind(self) -> None:
        """Give variables the values of tensors that are in their places now (``self.count = self.count + 1``)."""
        for module, name, variable in self._places:
            if (other := getattr(module, name)) is not variable:
                setattr(module, name, variable.copy_(other))

    def take_back(self) -> str | None:
        """Let the next pull take back what was written to variables here; returns the name of the first of them."""
        for index in (written := self.written()):
            self._noted[index] = self.tensors[index]._version
            self._known |= {part: -1 for part in self.variables[index].parts if part in self._known}
        return self.variables[written[0]].name if written else None

    def add_buffers(self) -> None:
        """Push what has been added to buffers since they were pulled; what is no number, as it is."""
        differences = Values()
        for index, before in self._buffers.items():
            tensor = self.tensors[index]
            self._noted[index] = tensor._version
            if torch.equal(tensor, before):
                continue
            self._buffers[index] = tensor.clone()
            (part,) = self.variables[index].parts
            if tensor.dtype != torch.bool and bool((difference := tensor - before).isfinite().all()):
                differences[part] = difference
            else:
                self.assign([index])
        self._sent.append(self._servers.send("add", differences))

    # -- optimizers --------------------------------------------------------------------------------------

    def adopt(self, optimizer: Optimizer) -> None:
        """Let an optimizer's ``step`` push gradients; its index is the number of those before."""
        index = len(self.optimizers)

        @functools.wraps(optimizer.step)  # a learning rate's schedule has left a note there
        def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            with torch.enable_grad():
                result = None if closure is None else closure()
            self._push(index, optimizer)
            return result

        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.add_param_group = _refuse_group  # type: ignore[method-assign, assignment]
        count_as_stepped(optimizer)  # by workers
        self.optimizers.append(optimizer)
        self.expire()  # how many steps it has made is pulled, too

    def _push(self, index: int, optimizer: Optimizer) -> None:
        self.rebind()
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        gradients = Values({part: part.of(p.grad) for p in trained for part in self.parts_of(p)})
        others = index, settings_of(optimizer), [made[index] for made in self._steps], self._worker
        # A server without gradients counts the step, too.
        self._sent.append(self._servers.send("push", gradients, *others, to_all=True))
        self.expire()

    def parts_of(self, tensor: Tensor) -> tuple[Part, ...]:
        """Where a variable lies; empty for what is none."""
        return self.variables[self.references[id(tensor)][1]].parts if id(tensor) in self.references else ()


def _refuse_group(group: Any) -> None:
    raise RuntimeError("an optimizer that servers step takes no more parameters: make another optimizer of them")


def settings_of(optimizer: Optimizer) -> Settings:
    """What the groups have beside their parameters."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
